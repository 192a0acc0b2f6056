"""Parsers of tool calls in generated text. They work as the text arrives; the result is the same streamed or not.

There are two formats. Qwen's (and Hermes') is `<tool_call>{"name", "arguments"}</tool_call>` within a text. In Llama
3's, the whole text is `{"name", "parameters"}`, several separated by `;`. Once a call has named an offered tool and its
arguments begin, they are passed on as they arrive. What is not a call stays text. Nothing that a model writes is
executed or evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_GAP = re.compile(r"\s*(;|\Z)\s*")
_HEAD = r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,\s*"%s"\s*:\s*(?=\{)'


@dataclass(frozen=True)
class Call:
    """The beginning of a call: a function's name, and what is known of its arguments (JSON text)."""

    name: str
    arguments: str = ""


@dataclass(frozen=True)
class More:
    """More of the last call's arguments."""

    arguments: str


Found = str | Call | More


class _Braces:
    """Finds the end of a JSON value in pieces of text. `depth`: brackets that are open."""

    def __init__(self) -> None:
        self.depth = 0
        self._quoted = self._escaped = False

    def close(self, text: str, depth: int) -> int:
        """Number of characters up to and including the bracket that returns to `depth`; -1 if it has not come yet."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == depth:
                    return at + 1
        return -1


class _Calls:
    """Base: a parser as a state machine. `key`: the arguments' name; `depth`: brackets that are open around them."""

    key, depth = "", 0

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._head = re.compile(_HEAD % self.key)
        self._buffer = ""
        self._braces = _Braces()
        self._called = False  # was there a call yet?
        self._step = self._first

    def feed(self, text: str) -> list[Found]:
        """Add text; returns what is now certain: text and calls."""
        self._buffer += text
        found: list[Found] = []
        while self._step(found):
            pass
        return found

    def _first(self, found: list[Found]) -> bool:
        """The first state. A state works on the buffer, and returns whether the next state can go on at once."""
        raise NotImplementedError

    def _closing(self, found: list[Found]) -> bool:
        """The state after the arguments."""
        raise NotImplementedError

    def _begins(self, found: list[Found]) -> bool:
        """Whether the buffer begins with a call of an offered tool, up to its arguments. If so, these are read next."""
        head = self._head.match(self._buffer)
        if head is None or head[1] not in self._names:
            return False
        found.append(Call(head[1]))
        self._buffer, self._step, self._braces = self._buffer[head.end() :], self._arguments, _Braces()
        self._braces.depth = self.depth
        return True

    def _arguments(self, found: list[Found]) -> bool:
        size = self._braces.close(self._buffer, self.depth)
        text = self._buffer if size < 0 else self._buffer[:size]
        if text:
            found.append(More(text))
        self._buffer = self._buffer[len(text) :]
        if size >= 0:
            self._step = self._closing
        return size >= 0


class QwenCalls(_Calls):
    """Calls between marks, with text around them. A tail that may become a mark is held back until that is certain.

    Whitespace next to calls is dropped.
    """

    key, depth = "arguments", 0

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._searched = 0  # characters of the buffer that hold no whole mark
        self._bare = True  # only whitespace since the last call, or since the beginning

    def end(self) -> list[Found]:
        """What is left when no text follows."""
        rest, self._buffer = self._buffer, ""
        if self._step == self._first:
            return [] if self._called and self._bare else _text(rest)
        if self._step != self._opening:
            return []
        call = _call(rest, "arguments", self._names)  # the closing mark may be missing after a whole call
        return [call] if call is not None else _text(OPEN + rest)

    def _first(self, found: list[Found]) -> bool:
        at = size = self._find(OPEN)
        if at < 0:  # hold back the longest end of the text that may become a mark
            ends = range(max(0, len(self._buffer) - len(OPEN) + 1), len(self._buffer))
            size = next((end for end in ends if OPEN.startswith(self._buffer[end:])), len(self._buffer))
        text = self._buffer[:size]
        self._bare = self._bare and not text.strip()
        if not self._bare:
            found += _text(text)
        if at < 0:
            if not self._bare:
                self._buffer = self._buffer[size:]
            self._searched = 0
            return False
        self._buffer, self._step = self._buffer[at + len(OPEN) :], self._opening
        return True

    def _opening(self, found: list[Found]) -> bool:
        """The state after an opening mark. A call begins once its name and the start of its arguments are there."""
        if self._begins(found):
            self._searched = 0
            return True
        at = self._find(CLOSE)
        if at < 0:
            return False
        call = _call(self._buffer[:at], "arguments", self._names)
        found += [call] if call is not None else _text(OPEN + self._buffer[: at + len(CLOSE)])
        self._leave(at, call is not None)
        return True

    def _closing(self, found: list[Found]) -> bool:
        at = self._find(CLOSE)
        if at >= 0:
            self._leave(at, True)
        return at >= 0

    def _find(self, mark: str) -> int:
        at = self._buffer.find(mark, max(0, self._searched - len(mark)))
        self._searched = len(self._buffer) if at < 0 else 0
        return at

    def _leave(self, at: int, called: bool) -> None:
        self._buffer, self._step = self._buffer[at + len(CLOSE) :], self._first
        self._called = self._called or called
        self._bare = called


class LlamaCalls(_Calls):
    """Calls that are the whole text. A text that begins as an object is held back until it is a call, or to its end.

    Whitespace next to calls is dropped.
    """

    key, depth = "parameters", 1  # the call's own bracket is open around the arguments

    def end(self) -> list[Found]:
        """What is left when no text follows."""
        rest, self._buffer = self._buffer, ""
        if self._step != self._first or (self._called and not rest.strip()):
            return []
        found = [_call(c, "parameters", self._names) for c in _objects(rest)]
        known = [c for c in found if c is not None]
        return [*known] if known and len(known) == len(found) else _text(rest)

    def _first(self, found: list[Found]) -> bool:
        if self._begins(found):
            self._called = True
            return True
        if self._buffer.lstrip()[:1] in ("", "{"):
            return False
        self._step = self._plain
        return True

    def _plain(self, found: list[Found]) -> bool:
        found += _text(self._buffer)
        self._buffer = ""
        return False

    def _closing(self, found: list[Found]) -> bool:
        size = self._braces.close(self._buffer, 0)
        self._buffer = "" if size < 0 else self._buffer[size:]
        if size >= 0:
            self._step = self._between
        return size >= 0

    def _between(self, found: list[Found]) -> bool:
        """The state after a call: another call, or text after all."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        another = rest[0] == ";"
        self._buffer, self._step = (rest[1:], self._first) if another else (self._buffer, self._plain)
        return True


Parser = QwenCalls | LlamaCalls
PARSERS: dict[str, type[Parser]] = {"qwen": QwenCalls, "llama3": LlamaCalls}


def parser_for(template: str | None) -> str | None:
    """The name of the parser for a chat template; None if it has no tools, or another format of calls."""
    if template is None or "tools" not in template:
        return None
    if OPEN in template:
        return "qwen"
    return "llama3" if "<|start_header_id|>" in template else None


def _text(text: str) -> list[Found]:
    return [text] if text else []


def _objects(text: str) -> list[str]:
    """The JSON objects of a text that consists only of objects separated by `;`; else an empty list."""
    decoder, found, at = json.JSONDecoder(), [], len(text) - len(text.lstrip())
    while True:
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        found.append(text[at:end])
        gap = _GAP.match(text, end)
        if gap is None or not gap[1]:
            return found if gap else []
        at = gap.end()


def _call(body: str, key: str, names: Collection[str]) -> Call | None:
    """The call in a JSON object, if it names an offered tool; else None."""
    try:
        value: Any = json.loads(body)
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get(key, {})
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises for half of an escaped surrogate pair, which is JSON but not text
    except (ValueError, RecursionError):
        return None
    return Call(name, text)
