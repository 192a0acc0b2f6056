"""Harmony, the chat format of gpt-oss: an answer is a row of messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

Messages in `analysis`, and those to a tool that the model knows by itself, are reasoning; others to a name are calls.
"""

from __future__ import annotations

import re

MESSAGE, CALL, ARGUMENTS, END = "<|message|>", "<|call|>", "[ARGS]", "<|end|>"
_END = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
_TAIL = re.compile(r"<(?:\|\w{0,7}\|?)?\Z")  # what may become one of these
_FUNCTION = re.compile(r"to=(?:functions\.|(?!(?:functions|python|browser|container|assistant)\b))([\w-]+)(?![\w.-])")


def is_harmony(template: str | None) -> bool:
    """Whether a chat template writes Harmony."""
    return template is not None and "<|channel|>" in template and MESSAGE in template


class Harmony:
    """Splits one answer into reasoning and text while it arrives. A call is the text `<|call|>NAME[ARGS]...<|end|>`."""

    def __init__(self, prompt_end: str | None) -> None:
        """`prompt_end`: the end of the prompt, where a message may have begun; None: the answer is text alone."""
        begun = "" if prompt_end is None else prompt_end.rpartition(END)[2].strip()
        inside = prompt_end is None or (begun and "<|" not in begun)
        self._buffer = MESSAGE if inside else begun.removesuffix("<|start|>assistant")
        self._size = 0
        self._open: str | None = None  # which part of the answer the open message belongs to
        self._shut = ""  # what stands in the text behind that message
        self._parts = {"reasoning": "", "text": ""}  # of the last piece
        self._begun = set[str]()  # parts that have a message
        self.end: int | None = 0  # where the reasoning ends in the whole answer; None: within it

    def feed(self, text: str, ended: bool) -> tuple[str, str]:
        """Add text; returns what is now certain of the reasoning, and of the text. `ended`: no more follows."""
        self._buffer, self._size = self._buffer + text, self._size + len(text)
        self._parts = dict.fromkeys(self._parts, "")
        while self._open or MESSAGE in self._buffer:
            if not self._open:
                head, _, self._buffer = self._buffer.partition(MESSAGE)
                self._begin(head)
            end = _END.search(self._buffer)
            held = end or (None if ended else _TAIL.search(self._buffer))
            at = held.start() if held else len(self._buffer)
            self._parts[self._open or "text"] += self._buffer[:at]
            begins = end is None or end[0] in ("<|start|>", "<|channel|>")  # these belong to the next header
            self._buffer = self._buffer[at if end is None or begins else end.end() :]
            if end is None:
                break
            if self._open == "reasoning":
                self.end = self._size - len(self._buffer)
            self._parts["text"] += self._shut
            self._open = None
        if ended and not self._open:  # no Harmony after all
            self._parts["text"] += self._buffer.partition("<|")[0]
        return self._parts["reasoning"], self._parts["text"]

    def _begin(self, head: str) -> None:
        """Begin a message with this header."""
        function = _FUNCTION.search(head)
        inner = "to=" in head or re.search(r"<\|channel\|>\s*analysis", head)
        self._open = "reasoning" if inner and not function else "text"
        self.end = None if self._open == "reasoning" else self.end
        gap, self._shut = "\n" if self._open in self._begun else "", END if function else ""
        self._parts[self._open] += f"{CALL}{function[1]}{ARGUMENTS}" if function else gap
        self._begun |= set() if function else {self._open}
