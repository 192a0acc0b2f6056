"""Splits a model's reasoning ("thoughts"), the text between two marks, from its answer while the text arrives."""

from __future__ import annotations

from typing import NamedTuple


class Marks(NamedTuple):
    """The marks of a model family's reasoning. `always`: a text begins with reasoning even without an opening mark."""

    open: str
    close: str
    always: bool = False


# Keys are vLLM's names of these parsers.
PARSERS = {
    "deepseek_r1": Marks("<think>", "</think>", always=True),
    "qwen3": Marks("<think>", "</think>"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
    "openai_gptoss": Marks("<|channel|>analysis<|message|>", "<|end|>"),
    "gemma4": Marks("<|channel>thought", "<channel|>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
}
NO_PARSER = "none"  # the setting that leaves reasoning in the text
_OF_CALLS = {"openai": "openai_gptoss", "gemma4": "gemma4"}  # the parser that goes with a format of calls, if one does
_OF_TEMPLATES = ("qwen3", "seed_oss", "mistral")  # parsers whose marks a chat template shows


def marks_for(template: str | None, calls: str | None, parser: str | None = None) -> Marks | None:
    """The marks of a model's reasoning; None: it has none, or its reasoning stays in the text.

    `calls`: the template's format of tool calls; `parser`: a key of PARSERS, NO_PARSER, or None: as the template says.
    """
    shown = (name for name in _OF_TEMPLATES if any(mark in (template or "") for mark in PARSERS[name][:2]))
    return PARSERS.get(_OF_CALLS.get(calls or "") or parser or next(shown, NO_PARSER))


class Thoughts:
    """Splits one text. What may become a mark is held back until that is certain; space after a mark is dropped."""

    def __init__(self, marks: Marks, prompt_end: str | None) -> None:
        """`prompt_end`: the end of the prompt, where a template may open or close the reasoning; None: no reasoning."""
        end = marks.close if prompt_end is None else prompt_end.rstrip()
        self._open, self._close = marks.open, marks.close
        self._inside = end.endswith(marks.open) or (marks.always and not end.endswith(marks.close))
        self._started = prompt_end is None  # was the opening mark looked for?
        self._bare = False  # only space since the last mark?
        self._buffer, self._size = "", 0
        self.end: int | None = None if self._inside else 0  # where the reasoning ends in the whole text, once known

    def feed(self, text: str, ended: bool) -> tuple[str, str]:
        """Add text; returns what is now certain of the reasoning, and of the answer. `ended`: no text follows."""
        self._buffer, self._size = self._buffer + text, self._size + len(text)
        if not self._started:
            begun = self._buffer.lstrip()
            if not ended and self._open.startswith(begun):
                return "", ""
            self._started = True
            if begun.startswith(self._open):
                self._buffer, self._bare = begun[len(self._open) :], True
                self._inside, self.end = True, None
        if not self._inside:
            return "", self._take(len(self._buffer))
        at = self._buffer.find(self._close)
        if at < 0:
            sizes = range(len(self._close) - 1, 0, -1)
            held = next((n for n in sizes if self._buffer.endswith(self._close[:n])), 0)
            return self._take(len(self._buffer) - (0 if ended else held)), ""
        thought = self._take(at)
        self._buffer, self._bare = self._buffer[len(self._close) :], True
        self._inside, self.end = False, self._size - len(self._buffer)
        return thought, self._take(len(self._buffer))

    def _take(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        text = text.lstrip() if self._bare else text
        self._bare = self._bare and not text
        return text
