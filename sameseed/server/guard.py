"""Guard: ASGI middleware that checks every request before routing: its API key, its host and its size.

It also assigns request ids, counts answers, and gives all errors one format. It decides by the path that the router
sees (of the connection, percent-decoded), never by a URL made from headers. Without a key it admits only GET (or HEAD)
of /health, /ready and /. The last is the playground: the same bytes for everyone, which fetches its data with a key.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sameseed.errors import reason
from sameseed.server import limits
from sameseed.server.config import ServerConfig
from sameseed.server.errors import ApiError, error_response, internal, unavailable

log = logging.getLogger("sameseed.server")
OPEN = ("/health", "/ready", "/")
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


Count = Callable[[Visit, str, int], None]


def visit_of(request: Request) -> Visit:
    """The Visit that the guard has stored for a request."""
    visit: Visit = request.scope["sameseed"]
    return visit


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

        async def answer(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                own = (b"x-request-id", visit.shown_id.encode())
                more = [*message.get("headers", ()), own, (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": more}
            elif bare and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            self._admit(scope, headers, visit)
            await self._app(scope, receive, answer)
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
        name = headers.get(b"host", b"localhost").decode("latin-1").lower()
        if name.rpartition(":")[2].isdigit():
            name = name.rpartition(":")[0]
        known = (*_LOCAL, self._config.host.lower(), *map(str.lower, self._config.allowed_hosts))
        if self._config.loopback and name not in known:
            raise ApiError(403, "this Host is not served here; call it localhost, or start it with --allowed-host")
        if self._config.keys and not (scope["path"] in OPEN and scope["method"] in ("GET", "HEAD")):
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            tenant = self._config.keys.tenant(key.strip()) if scheme.lower() == b"bearer" else None
            if tenant is None:
                raise ApiError(
                    401, "a valid API key is missing; send 'Authorization: Bearer KEY'", code="invalid_api_key"
                )
            visit.tenant = tenant
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limits.MAX_BODY:
            raise limits.too_large()
