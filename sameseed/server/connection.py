"""The way of every request to the routes: HTTP/1.1 connections with limits; the guard: keys, hosts, sizes; the body.

The guard also assigns request ids, counts answers, and gives all errors one format. It decides by the path that the
router sees (of the connection, percent-decoded), never by a URL made from headers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
import resource
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sameseed.errors import reason
from sameseed.server import limits
from sameseed.server.config import ServerConfig
from sameseed.server.errors import ApiError, bad_request, error_response, internal, unavailable
from sameseed.server.gate import Gate

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

    def _unsupported_upgrade_warning(self) -> None:
        """No warning: a client that offers HTTP/2, as Java's does, is answered in HTTP/1.1."""

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


log = logging.getLogger("sameseed.server")
OPEN = ("/health", "/ready", "/")  # need no key; the last is the playground, the same bytes for everyone
MAX_HEADERS = 100
MAX_CLIENT_ID = 128
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # the others count as one: clients invent them
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


@dataclass
class Visit:
    """Facts about a request, known before its body is read. Stored in `scope["sameseed"]`."""

    id: str
    tenant: str = ""
    size: int = 0  # bytes of the body that have been read
    client_id: str | None = None  # the client's own id: repeated and logged, never used
    arrived: float = field(default_factory=time.monotonic)
    method: str = ""
    error: str | None = None  # what the client was told instead of an answer
    outcome: int | None = None  # if it is not the response's status: 499, or an error in a stream

    @property
    def shown_id(self) -> str:
        """The id in the answer's header and in its error: the client's own, or else ours."""
        return self.client_id or self.id


def visit_of(request: Request) -> Visit:
    """The Visit that the guard has stored for a request."""
    visit: Visit = request.scope["sameseed"]
    return visit


INLINE = 2**16  # bytes: a larger body is parsed in a thread
MAX_ARRIVING = 128 * 2**20  # bytes of all bodies that are being read, parsed or checked


@asynccontextmanager
async def held(request: Request, gate: Gate) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON object of a request's body. Its bytes (the visit's `size`) count until the context is left.

    Raises ApiError: 400, 408, 413, 415, 503.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site can send other types without CORS
        raise ApiError(415, "send JSON, with 'Content-Type: application/json'")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "send the body as it is, without 'Content-Encoding'")
    visit, parts = visit_of(request), list[bytes]()

    async def collect() -> None:
        async for part in request.stream():
            if visit.size + len(part) > limits.MAX_BODY:
                raise limits.too_large()
            if gate.size_arriving + len(part) > MAX_ARRIVING:
                raise unavailable("too many large requests arrive at once; try again later", retry_after=1)
            parts.append(part)
            visit.size += len(part)
            gate.size_arriving += len(part)

    try:
        try:
            await asyncio.wait_for(collect(), limits.BODY_TIMEOUT)
        except asyncio.TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="timeout") from None
        yield await limits.away(visit.size > INLINE, lambda: limits.parse_object(b"".join(parts)), None)
    except ClientDisconnect:
        raise ApiError(400, "the client left") from None
    finally:
        gate.size_arriving -= visit.size


Count = Callable[[Visit, str, int], None]


def _is_closing(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Whether a request has a body after which its connection closes. A client that waits for 100 sends none."""
    closing = scope.get("http_version") == "1.0" or b"close" in headers.get(b"connection", b"").lower()
    has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
    return closing and has_body and b"expect" not in headers


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, config: ServerConfig, count: Count) -> None:
        """`count` gets the visit, the route and the status of each answer (499: the client disconnected)."""
        self._app, self._config, self._count = app, config, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = dict(reversed(scope["headers"]))  # of repeated headers the first counts
        name = headers.get(b"x-request-id", b"")
        fit = 0 < len(name) <= MAX_CLIENT_ID and all(0x21 <= b < 0x7F for b in name)
        bare = scope["method"] == "HEAD"  # answered as GET, without the body
        scope = {**scope, "method": "GET" if bare else scope["method"]}
        visit = scope["sameseed"] = Visit(secrets.token_hex(12), client_id=name.decode("ascii") if fit else None)
        visit.method = "HEAD" if bare else scope["method"] if scope["method"] in METHODS else "other"
        status = 500
        started = False
        unread = _is_closing(scope, headers)  # is there a body to read before the connection closes?

        async def listen() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def drop_rest() -> None:
            while unread:
                await listen()

        async def answer(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                own = (b"x-request-id", visit.shown_id.encode())
                more = [*message.get("headers", ()), own, (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": more}
            elif bare and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            if unread and message["type"] == "http.response.body" and not message.get("more_body"):
                # To close now would reset the connection, and a client that still sends would lose the answer.
                await send({**message, "more_body": True})
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(drop_rest(), limits.BODY_TIMEOUT)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            self._admit(scope, headers, visit)
            await self._app(scope, listen, answer)
        except ApiError as error:
            if not started:
                await error_response(error, visit)(scope, receive, answer)
        except asyncio.CancelledError:  # the server ends, and no longer waits for requests
            if started:
                raise
            await error_response(unavailable("the server is shutting down"), visit)(scope, receive, answer)
        except Exception as error:
            log.exception("a request failed", extra={"request_id": visit.id})
            if not started:
                await error_response(internal(reason(error)), visit)(scope, receive, answer)
        finally:
            if visit.error is not None and visit.outcome is None:  # else it was logged with the answer
                told = {"request_id": visit.id, "client_request_id": visit.client_id, "status": status}
                log.info("refused", extra=told | {"error": visit.error})
            path = getattr(scope.get("route"), "path", None)  # its pattern: all unknown paths count as one
            self._count(visit, path if isinstance(path, str) else "other", visit.outcome or status)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes], visit: Visit) -> None:
        """Check a request's headers, host, key and size; set the visit's tenant. Raises ApiError 400, 401, 403, 413."""
        if len(scope["headers"]) > MAX_HEADERS:
            raise ApiError(400, f"more than {MAX_HEADERS} headers")
        # DNS rebinding: a web page from elsewhere must not reach a server on the user's machine by its own host name.
        # A UNIX socket it cannot reach, and proxies send any name there.
        name = headers.get(b"host", b"localhost").decode("latin-1").lower()
        if name.rpartition(":")[2].isdigit():
            name = name.rpartition(":")[0]
        known = (*_LOCAL, self._config.host.lower(), *map(str.lower, self._config.allowed_hosts))
        if self._config.loopback and self._config.uds is None and name not in known:
            raise ApiError(403, "this Host is not served here; call it localhost, or start it with --allowed-host")
        if self._config.keys and not (scope["path"] in OPEN and scope["method"] in ("GET", "HEAD")):
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            tenant = self._config.keys.tenant(key.strip()) if scheme.lower() == b"bearer" else None
            if tenant is None:
                raise ApiError(401, "send a valid API key: 'Authorization: Bearer KEY'", code="invalid_api_key")
            visit.tenant = tenant
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limits.MAX_BODY:
            raise limits.too_large()
