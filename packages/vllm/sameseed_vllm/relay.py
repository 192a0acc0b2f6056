"""Relay: passes one request on to vLLM and its answer back, until it ends, times out or its client disconnects.

Events are passed on whole, however they arrive in chunks. Errors, also in events, lose host addresses and paths.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from starlette.types import Receive, Scope, Send

from sameseed.server.answer import Answering
from sameseed.server.errors import ApiError, clean, internal, unavailable
from sameseed.server.gate import Ticket
from sameseed.server.replies import DONE, event
from sameseed_vllm.client import VllmClient

log = logging.getLogger("sameseed.server")
MAX_EVENT = 64 * 2**20  # bytes: the log-probabilities of a long prompt are one event
_END = re.compile(rb"\n\r?\n")
_LAST = 2  # bytes of the held text that may already belong to an event's end
_ERROR = b'"error"'  # in every event that reports one; within a JSON string it has backslashes
# Host addresses: URLs, IP addresses, and localhost.
_PLACES = re.compile(
    r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>)\]}]+|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?"
    r"|\[[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:.]*\](?::\d+)?|\blocalhost(?::\d+)?"
)


class Relay(Answering):
    """Passes a body on to vLLM, and the answer back."""

    def __init__(self, client: VllmClient, path: str, body: bytes, ticket: Ticket, timeout: float) -> None:
        super().__init__(ticket, timeout)
        self._client, self._path, self._body = client, path, body
        self._events: Events | None = None

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer as it arrives. vLLM stops generating when the connection is closed."""
        async with self._client.post(self, self._path, self._body) as response:
            if response.status != 200:
                raise told(response.status, await response.read())
            kind = response.headers.get("content-type", "application/json")
            events = self._events = Events() if kind.startswith("text/event-stream") else None
            headers = [(b"content-type", kind.encode("latin-1")), (b"cache-control", b"no-cache")]
            self._status, self._streaming = 200, events is not None
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in response.content.iter_any():
                whole = chunk if events is None else events.feed(chunk)
                if whole:
                    await send({"type": "http.response.body", "body": whole, "more_body": True})
            rest = b"" if events is None else events.end()
            await send({"type": "http.response.body", "body": rest, "more_body": False})
            if events is not None and events.failed:
                self._status = 500

    def _last(self, error: ApiError, request_id: str) -> bytes | None:  # events were sent whole, so another may follow
        return None if self._events is None else event(error.body(request_id)) + DONE


def told(status: int, raw: bytes) -> ApiError:
    """Turn an error of vLLM into an ApiError: in OpenAI's format, without paths and addresses."""
    fault: Any = None
    try:
        fault = json.loads(raw)["error"]
    except (ValueError, KeyError, TypeError):
        log.warning("an answer of status %s that is no error in OpenAI's shape", status)
    if status in (401, 403) or status >= 500:  # between the server and vLLM; a client cannot fix it
        return unavailable("the engine is not ready for this request; try again later") if status == 503 else internal()
    fault = fault if isinstance(fault, dict) else {}
    message, param = fault.get("message"), fault.get("param")
    param = without_places(param)[:64] if isinstance(param, str) else None
    status = 400 if status == 422 else status
    return ApiError(status, without_places(message or "the engine refused this request"), param=param)


class Events:
    """Joins chunks to whole events, and cleans errors in them. `failed`: an event reported an error."""

    def __init__(self) -> None:
        self.failed = False
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """The events that are complete now. Raises ApiError 500 for one longer than MAX_EVENT."""
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
        """The rest at the end of the stream: an event without the empty line after it."""
        rest, self._held = bytes(self._held), bytearray()
        return self._cleaned(rest)

    def _cleaned(self, events: bytes) -> bytes:
        return b"\n".join(map(self._line, events.split(b"\n"))) if _ERROR in events else events

    def _line(self, line: bytes) -> bytes:
        if _ERROR not in line or not line.startswith(b"data:"):
            return line
        try:
            data = json.loads(line[len(b"data:") :])
        except ValueError:
            data = {"error": None, "type": "error"}  # unreadable: reported without its text
        fault = _without_inside(data)
        if fault is None:
            return line
        self.failed = True
        return b"data: " + json.dumps(fault, ensure_ascii=False, separators=(",", ":")).encode()


def without_places(message: Any) -> str:
    """A message without host addresses; `ApiError` itself takes out paths and memory addresses."""
    return _PLACES.sub("...", str(message)[: 2**14])


def _without_inside(data: Any) -> dict[str, Any] | None:
    """The cleaned data of an event that reports an error; None if it reports none."""
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
    if isinstance(response, dict) and isinstance(response.get("error"), dict):  # a failed response as a whole
        error = response["error"]
        said = clean(without_places(error.get("message", "")))
        return {**data, "response": {**response, "error": {"code": _word(error, "code"), "message": said}}}
    return None


def _word(fault: dict[str, Any], name: str) -> str | None:
    value = fault.get(name)
    return None if value is None else clean(without_places(value))[:64]
