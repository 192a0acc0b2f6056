"""uvicorn's HTTP/1.1 connections, with limits on their number and on how long they may stay silent."""

from __future__ import annotations

import asyncio
import json
import resource

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from sameseed.server.errors import unavailable

WAIT = 80.0  # seconds for a request's head to arrive; longer than uvicorn keeps an idle connection
RESERVED = 64  # file descriptors not for clients but for libraries, pipes and restarted engines
_SOFT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAX_CONNECTIONS = max(8, (2**20 if _SOFT == resource.RLIM_INFINITY else _SOFT) - RESERVED)
CUT = "sameseed.cut"  # key in a request's scope: a function that aborts its connection


async def cut(scope: Scope) -> None:
    """Abort a connection whose answer is half sent. An orderly close would wait for a client that reads nothing."""
    if CUT in scope:
        scope[CUT]()
        await asyncio.sleep(0)  # the protocol hears of the abort before the request ends


class Patient(H11Protocol):
    """HTTP/1.1 with `WAIT` seconds for the head of each request; uvicorn itself would wait forever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            error = unavailable("too many connections are open; try again later", retry_after=1)
            body = json.dumps(error.body()).encode()
            head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            transport.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            transport.close()
        else:
            self._mind()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._mind()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._mind()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

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
