"""Tool calls in what a model writes: found as the text arrives, the same whether it is streamed or not.

Two ways of writing them: Qwen's (and Hermes') `<tool_call>{"name", "arguments"}</tool_call>` within a text, and
Llama 3's, where the whole text is `{"name", "parameters"}`, several with `;` between. What is no call stays text.
Nothing that a model writes is run or evaluated: it is read as JSON, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


Found = str | Call


class QwenCalls:
    """Calls between marks, text around them. A tail that may become a mark is held back until that is decided."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._inside = False
        self._searched = 0  # characters of the buffer that hold no whole mark

    def feed(self, text: str) -> list[Found]:
        """What became certain with this text."""
        self._buffer += text
        found: list[Found] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            at = self._buffer.find(mark, max(0, self._searched - len(mark)))
            if at < 0:
                break
            body, self._buffer, self._searched = self._buffer[:at], self._buffer[at + len(mark) :], 0
            found += self._between(body) if self._inside else _text(body)
            self._inside = not self._inside
        self._searched = len(self._buffer)
        if not self._inside:
            keep = _tail(self._buffer, OPEN)
            found += _text(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            self._searched = 0
        return found

    def end(self) -> list[Found]:
        """What is left when no text follows."""
        rest, self._buffer = self._buffer, ""
        if not self._inside:
            return _text(rest)
        call = _call(rest, "arguments", self._names)  # the mark at the end may be missing, the call be whole
        return [call] if call is not None else _text(OPEN + rest)

    def _between(self, body: str) -> list[Found]:
        call = _call(body, "arguments", self._names)
        return [call] if call is not None else _text(OPEN + body + CLOSE)


class LlamaCalls:
    """A text that begins as an object is held back to its end: then it is calls, or text after all."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: list[str] = []
        self._first = ""  # the first character that is no space
        self._plain = False

    def feed(self, text: str) -> list[Found]:
        """What became certain with this text."""
        if self._plain:
            return _text(text)
        self._held.append(text)
        self._first = self._first or text.lstrip()[:1]
        if self._first in ("", "{"):
            return []
        self._plain = True
        return _text("".join(self._held))

    def end(self) -> list[Found]:
        """What is left when no text follows."""
        if self._plain:
            return []
        whole = "".join(self._held)
        calls = _objects(whole)
        found = [_call(c, "parameters", self._names) for c in calls]
        known = [c for c in found if c is not None]
        return [*known] if known and len(known) == len(found) else _text(whole)


Parser = QwenCalls | LlamaCalls
PARSERS: dict[str, type[Parser]] = {"qwen": QwenCalls, "llama3": LlamaCalls}


def parser_for(template: str | None) -> str | None:
    """The name of the parser for a chat template; None where it knows no tools, or writes them in another way."""
    if template is None or "tools" not in template:
        return None
    if OPEN in template:
        return "qwen"
    return "llama3" if "<|start_header_id|>" in template else None


def _text(text: str) -> list[Found]:
    return [text] if text else []


def _tail(text: str, mark: str) -> int:
    """Length of the longest end of the text that begins the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def _objects(text: str) -> list[str]:
    """The JSON objects of a text that is nothing but objects with `;` between; else none."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        found.append(text[at:end])
        at = end
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            return found
        if text[at] != ";":
            return []
        at += 1


def _call(body: str, key: str, names: Collection[str]) -> Call | None:
    """The call that an object is, if it names a tool that was offered."""
    try:
        value: Any = json.loads(body)
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get(key, {})
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # half of a surrogate pair, escaped, is JSON and no text
    except (ValueError, RecursionError):
        return None
    return Call(name, text)
