"""Relay: one request on its way through vLLM, whole or as events, until it ends, time is up, or its client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sameseed.server.answer import GRACE, LEFT, client_left, error_response, too_late
from sameseed.server.connection import cut
from sameseed.server.errors import ApiError, internal, unavailable
from sameseed.server.events import Events, without_places
from sameseed.server.gate import Ticket
from sameseed.server.link import read_some
from sameseed.server.replies import DONE, event
from sameseed.server.vllm import VllmClient

log = logging.getLogger("sameseed.server")


class Relay(Response):
    """Passes a body on and the answer back; always gives back its ticket."""

    def __init__(self, client: VllmClient, path: str, body: bytes, ticket: Ticket, timeout: float) -> None:
        """`timeout`: seconds for all of it."""
        super().__init__()
        self._client, self._path, self._body, self._ticket, self._timeout = client, path, body, ticket, timeout
        self._stopped: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._status = 0  # of what has begun to be sent
        self._events: Events | None = None

    def leave(self, error: ApiError) -> None:
        """End it with this error."""
        if not self._stopped.done():
            self._stopped.set_result(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit, loop = scope["sameseed"], asyncio.get_running_loop()
        status = LEFT
        self._client.enter(self)
        work: asyncio.Task[None] | None = None
        watcher = loop.create_task(client_left(receive))
        try:
            work = loop.create_task(self._pass_on(send))
            await asyncio.wait((work, watcher, self._stopped), timeout=self._timeout, return_when="FIRST_COMPLETED")
            if not work.done() and watcher.done():  # vLLM stops when the connection is closed
                return
            error = await self._outcome(work)
            status = self._status if error is None else error.status
            if error is not None and not await self._tell(error, scope, receive, send):
                await cut(scope)
        finally:
            for task in (work, watcher):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            self._client.forget(self)
            self._ticket.close()
            visit.outcome = status
            took = round((time.monotonic() - visit.arrived) * 1e3, 1)
            told = {"request_id": visit.id, "client_request_id": visit.client_id, "status": status, "total_ms": took}
            log.info("answered", extra=told)

    async def _outcome(self, work: asyncio.Task[None]) -> ApiError | None:
        """Why the answer did not come to its end; None where it did."""
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return self._stopped.result() if self._stopped.done() else too_late(self._timeout)
        error = work.exception()
        if error is None or isinstance(error, ApiError):
            return error
        log.error("a request failed", exc_info=error)
        return internal()

    async def _tell(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> bool:
        """Tell the client, if it reads and there is a way to: half of a body has none. Does it know?"""
        if not self._status:
            telling: Awaitable[None] = error_response(error)(scope, receive, send)
        elif self._events is not None:  # events were sent whole, so that this one stands by itself
            last = event(error.body()) + DONE
            telling = send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            return False
        try:
            await asyncio.wait_for(telling, GRACE)
        except asyncio.TimeoutError:
            return False
        return True

    async def _pass_on(self, send: Send) -> None:
        """The answer, as it comes. Raises ApiError for one that is an error."""
        async with self._client.check().post(self._path, self._body) as response:
            if response.status_code != 200:
                raise told(response.status_code, await read_some(response))
            kind = response.headers.get("content-type", "application/json")
            events = self._events = Events() if kind.startswith("text/event-stream") else None
            headers = [(b"content-type", kind.encode("latin-1")), (b"cache-control", b"no-cache")]
            self._status = 200
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in response.aiter_raw():
                whole = chunk if events is None else events.feed(chunk)
                if whole:
                    await send({"type": "http.response.body", "body": whole, "more_body": True})
            rest = b"" if events is None else events.end()
            await send({"type": "http.response.body", "body": rest, "more_body": False})
            if events is not None and events.failed:
                self._status = 500


def told(status: int, raw: bytes) -> ApiError:
    """An error of vLLM's as one of ours: in OpenAI's shape, without paths and addresses."""
    fault: Any = None
    try:
        fault = json.loads(raw)["error"]
    except (ValueError, KeyError, TypeError):
        log.warning("an answer of status %s that is no error in OpenAI's shape", status)
    if status in (401, 403) or status >= 500:  # between us and vLLM; nothing that a client could mend
        return unavailable("the engine is not ready for this request; try again later") if status == 503 else internal()
    fault = fault if isinstance(fault, dict) else {}
    message, param = fault.get("message"), fault.get("param")
    param = without_places(param)[:64] if isinstance(param, str) else None
    status = 400 if status == 422 else status
    return ApiError(status, without_places(message or "the engine refused this request"), param=param)
