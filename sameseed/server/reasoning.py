"""Thoughts in what a model writes: text between two marks, told apart from the answer as it arrives."""

from __future__ import annotations

from typing import NamedTuple


class Marks(NamedTuple):
    """How a family writes its thoughts. `always`: a text begins as thoughts also where no mark opens them."""

    open: str
    close: str
    always: bool = False


# By vLLM's names.
PARSERS = {
    "deepseek_r1": Marks("<think>", "</think>", always=True),
    "qwen3": Marks("<think>", "</think>"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}


class Thoughts:
    """Splits one text. What may become a mark is held back until that is decided; space behind a mark is no text."""

    def __init__(self, marks: Marks, prompt_end: str | None) -> None:
        """`prompt_end`: the last of the prompt, where a template opens or closes thoughts; None: they cannot come."""
        end = marks.close if prompt_end is None else prompt_end.rstrip()
        self._open, self._close = marks.open, marks.close
        self._inside = end.endswith(marks.open) or (marks.always and not end.endswith(marks.close))
        self._started = self._bare = False  # is the first mark decided; is nothing but space behind the last one
        self._buffer = ""
        self._size = 0
        self.end: int | None = None if self._inside else 0  # where in the whole text they end, once that is known

    def feed(self, text: str, ended: bool) -> tuple[str, str]:
        """What became certain of the thoughts, and of the answer; `ended`: no text follows."""
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
