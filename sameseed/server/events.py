"""Events: those of vLLM's streams, passed on whole, whatever chunks they come in; errors among them as ours are."""

from __future__ import annotations

import json
import re
from typing import Any

from sameseed.server.errors import ApiError, clean, internal

MAX_EVENT = 64 * 2**20  # bytes: the log-probabilities of a long prompt are one event
_END = re.compile(rb"\n\r?\n")
_LAST = 2  # bytes of what was held before that may belong to the end of an event
_ERROR = b'"error"'  # in every event that tells of one; in a text it has backslashes
# Addresses of machines: with a scheme, as numbers, or with a port.
_PLACES = re.compile(
    r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>)\]}]+|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?"
    r"|\[[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:.]*\](?::\d+)?|\blocalhost(?::\d+)?"
)


class Events:
    """Takes chunks, gives whole events. `failed`: one of them told of an error."""

    def __init__(self) -> None:
        self.failed = False
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """The events that are complete now. Raises ApiError 500 for one that does not end."""
        start = max(0, len(self._held) - _LAST)
        self._held += chunk
        end = 0
        for found in _END.finditer(self._held, start):
            end = found.end()
        if not end:
            if len(self._held) > MAX_EVENT:
                raise internal()
            return b""
        whole = bytes(self._held[:end])
        del self._held[:end]
        return self._cleaned(whole)

    def end(self) -> bytes:
        """What is left when the stream came to its end: an event without the empty line behind it."""
        rest, self._held = bytes(self._held), bytearray()
        return self._cleaned(rest)

    def _cleaned(self, events: bytes) -> bytes:
        if _ERROR not in events:
            return events
        return b"\n".join(self._line(line) if _ERROR in line else line for line in events.split(b"\n"))

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):
            return line
        try:
            data = json.loads(line[len(b"data:") :])
        except ValueError:
            data = {"error": None, "type": "error"}  # who knows what it says
        fault = _without_inside(data)
        if fault is None:
            return line
        self.failed = True
        return b"data: " + json.dumps(fault, ensure_ascii=False, separators=(",", ":")).encode()


def without_places(message: Any) -> str:
    """A message without addresses of machines; `ApiError` takes paths and the like out."""
    return _PLACES.sub("...", str(message)[: 2**14])


def _without_inside(data: Any) -> dict[str, Any] | None:
    """An event's data where it tells of an error, cleaned; None where it tells of none."""
    if not isinstance(data, dict):
        return None
    error, response = data.get("error"), data.get("response")
    if error is not None:
        message = error.get("message") if isinstance(error, dict) else None
        return (internal() if message is None else ApiError(500, without_places(message))).body()
    if data.get("type") == "error":
        message = data.get("message")
        said = internal().message if message is None else clean(without_places(message))
        number = {"sequence_number": data["sequence_number"]} if isinstance(data.get("sequence_number"), int) else {}
        return {"type": "error", "code": _word(data, "code"), "message": said, "param": _word(data, "param"), **number}
    if isinstance(response, dict) and isinstance(response.get("error"), dict):  # the whole of a response that failed
        error = response["error"]
        said = clean(without_places(error.get("message", "")))
        return {**data, "response": {**response, "error": {"code": _word(error, "code"), "message": said}}}
    return None


def _word(fault: dict[str, Any], name: str) -> str | None:
    value = fault.get(name)
    return None if value is None else clean(without_places(value))[:64]
