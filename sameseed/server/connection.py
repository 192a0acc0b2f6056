"""uvicorn's HTTP/1.1 connections, with limits on their number and silence, and one way to read a request's length."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import resource
import socket
from typing import Any

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from sameseed.server import limits
from sameseed.server.errors import ApiError, bad_request, unavailable

WAIT = 80.0  # seconds for a request's head to arrive; longer than uvicorn keeps an idle connection
PROBE, LOOK = 0.5, 0.1  # seconds without an answer after which a half-closed connection is probed; between looks at it
RESERVED = 64  # file descriptors not for clients but for libraries, pipes and restarted engines
_SOFT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAX_CONNECTIONS = max(8, (2**20 if _SOFT == resource.RLIM_INFINITY else _SOFT) - RESERVED)
CUT = "sameseed.cut"  # key in a request's scope: a function that aborts its connection
_LENGTHS = re.compile(rb"^(?:content-length|transfer-encoding):", re.IGNORECASE | re.MULTILINE)
_ABSOLUTE = re.compile(rb"^https?://[^/?#]*/?", re.IGNORECASE)  # what clients of a proxy put before a target's path
# A line end without CR, a folded header line, and a Content-Length that is a list.
_UNCLEAR = re.compile(rb"(?<!\r)\n|\n[ \t]|\ncontent-length:[^\n]*,", re.IGNORECASE)


async def cut(scope: Scope) -> None:
    """Abort a connection whose answer is half sent. An orderly close would wait for a client that reads nothing."""
    if CUT in scope:
        scope[CUT]()
        await asyncio.sleep(0)  # the protocol hears of the abort before the request ends


class Strict(h11.Connection):
    """h11, which refuses a head that a proxy in front may have read otherwise (RFC 9112, 11.2: request smuggling)."""

    def next_event(self) -> Any:
        """As h11's. Raises RemoteProtocolError also for two lengths, folded lines, and line ends without CR."""
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            head = before[: len(before) - len(self.trailing_data[0])]
            lengths = _LENGTHS.findall(head)
            old = event.http_version < b"1.1" and b"transfer-encoding" in head.lower()
            if old or len(lengths) > 1 or _UNCLEAR.search(head):
                raise h11.RemoteProtocolError("the request's head can be read in several ways")
            event = dataclasses.replace(event, target=_ABSOLUTE.sub(b"/", event.target, 1))
        return event


class Patient(H11Protocol):
    """HTTP/1.1 with `WAIT` seconds for the head of each request; uvicorn itself would wait forever."""

    _deadline: asyncio.TimerHandle | None = None
    _half_closed = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn = Strict(h11.SERVER, limits.MAX_HEADERS)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(unavailable("too many connections are open; try again later", retry_after=1))
        else:
            self._mind()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._mind()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own type
        """A client may close its half of the connection after its request: it gets its answer, then all is closed.

        A client that left looks the same. So while there is no answer it is probed by an interim response, which
        clients pass over; the system of one that left resets the connection. TLS has no half-closed connections.
        """
        self._half_closed = not self._waiting and not self.cycle.more_body and self.scheme == "http"
        if self._half_closed:
            self.loop.call_later(PROBE, self._probe)
        return self._half_closed

    def _probe(self, sent: bool = False) -> None:
        if self.transport.is_closing() or self.cycle.response_started:  # then each write is a probe
            return
        wire = self.transport.get_extra_info("socket")
        if self.cycle.scope["http_version"] == "1.0" or (sent and wire.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
            self.transport.abort()
            return
        if not sent:
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim))
        self.loop.call_later(LOOK, self._probe, True)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP/1.1, or can be read in several ways, in OpenAI's format; close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None:
                self.cycle.disconnected = True  # its body is broken: no other answer
            text = "this is not HTTP, or its length can be read in two ways; mend the client or proxy"
            self._refuse(bad_request(text))
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._mind()
        if self._half_closed and self._waiting:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _refuse(self, error: ApiError) -> None:
        """Send an error that belongs to no request, and close the connection."""
        body = json.dumps(error.body()).encode()
        status = {400: "400 Bad Request"}.get(error.status, "503 Service Unavailable")
        headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        lines = (f"{name}: {value}\r\n" for name, value in (headers | error.headers()).items())
        self.transport.write(f"HTTP/1.1 {status}\r\n{''.join(lines)}\r\n".encode() + body)
        self.transport.close()

    @property
    def _waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _mind(self) -> None:
        """Run the timer only while no request is being answered. Let a request abort its connection: see `cut`."""
        if self.scope is not None:
            scope: Scope = self.scope  # type: ignore[assignment]
            scope.setdefault(CUT, self.transport.abort)
        if self._waiting and self._deadline is None:
            self._deadline = self.loop.call_later(WAIT, self._late)
        elif not self._waiting and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self._waiting and not self.transport.is_closing():
            self.transport.close()
