"""Relay: one request on its way through vLLM, whole or as events, until it ends, time is up, or its client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foretoken.server.answer import LEFT, error_response
from foretoken.server.errors import ApiError, internal, unavailable
from foretoken.server.gate import Ticket
from foretoken.server.link import Link, read_some
from foretoken.server.replies import DONE, event
from foretoken.server.vllm import VllmClient

log = logging.getLogger("foretoken.server")
FAULT = b'data: {"error"'  # how an event begins that tells of one


class Relay(Response):
    """Passes a body on and the answer back; always gives back its ticket."""

    def __init__(self, client: VllmClient, path: str, body: bytes, ticket: Ticket, timeout: float) -> None:
        """`timeout`: seconds for all of it."""
        super().__init__()
        self._client, self._path, self._body, self._ticket, self._timeout = client, path, body, ticket, timeout
        self._stopped: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._status = 0  # of what has begun to be sent
        self._events = False

    def leave(self, error: ApiError) -> None:
        """End it with this error."""
        if not self._stopped.done():
            self._stopped.set_result(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit, loop = scope["foretoken"], asyncio.get_running_loop()
        status = LEFT
        self._client.enter(self)
        work: asyncio.Task[None] | None = None
        watcher = loop.create_task(_left(receive))
        try:
            work = loop.create_task(self._pass_on(self._client.check(), send))
            await asyncio.wait((work, watcher, self._stopped), timeout=self._timeout, return_when="FIRST_COMPLETED")
            if not work.done() and watcher.done():  # vLLM stops when the connection is closed
                return
            status = await self._end(work, scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            status = error.status
        finally:
            for task in (work, watcher):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            self._client.forget(self)
            self._ticket.leave()
            visit.outcome = status
            took = round((time.monotonic() - visit.arrived) * 1e3, 1)
            told = {"request_id": visit.id, "client_request_id": visit.client_id, "status": status, "total_ms": took}
            log.info("answered", extra=told)

    async def _end(self, work: asyncio.Task[None], scope: Scope, receive: Receive, send: Send) -> int:
        """What the client is told where the answer did not come to its end; returns the status that is counted."""
        error: BaseException | None
        if work.done():
            error = work.exception()
        else:
            late = ApiError(408, f"the request took longer than {self._timeout:g} s", code="timeout")
            error = self._stopped.result() if self._stopped.done() else late
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if error is None:
            return self._status
        if not isinstance(error, ApiError):
            log.error("a request failed", exc_info=error)
            error = internal()
        if not self._status:
            await error_response(error)(scope, receive, send)
        elif self._events:
            last = event(error.body()) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            raise error  # half of a body: the connection is cut
        return error.status

    async def _pass_on(self, link: Link, send: Send) -> None:
        """The answer, as it comes. Raises ApiError for one that is an error."""
        async with link.post(self._path, self._body) as response:
            if response.status_code != 200:
                raise told(response.status_code, await read_some(response))
            kind = response.headers.get("content-type", "application/json")
            self._events = kind.startswith("text/event-stream")
            headers = [(b"content-type", kind.encode("latin-1")), (b"cache-control", b"no-cache")]
            self._status = 200
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in response.aiter_raw():
                chunk = cleaned(chunk) if self._events and FAULT in chunk else chunk
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def told(status: int, raw: bytes) -> ApiError:
    """An error of vLLM's as one of ours: in OpenAI's shape, without paths and addresses."""
    fault: Any = None
    try:
        fault = json.loads(raw)["error"]
    except (ValueError, KeyError, TypeError):
        log.warning("an answer of status %s that is no error in OpenAI's shape", status)
    if status in (401, 403) or status >= 500:  # between us and vLLM; nothing that a client could mend
        return unavailable("the engine is not ready for this request; try again later") if status == 503 else internal()
    message = fault.get("message") if isinstance(fault, dict) else None
    status = 400 if status == 422 else status
    return ApiError(status, str(message or "the engine refused this request"), param=_text(fault, "param"))


def _text(fault: Any, name: str) -> str | None:
    value = fault.get(name) if isinstance(fault, dict) else None
    return value[:64] if isinstance(value, str) else None


def cleaned(chunk: bytes) -> bytes:
    """Events of a chunk, those that tell of an error without paths and addresses."""
    lines = []
    for line in chunk.split(b"\n"):
        if line.startswith(FAULT):
            try:
                fault = json.loads(line[5:])["error"]
                line = event(ApiError(500, str(fault.get("message", "the engine failed"))).body()).rstrip(b"\n")
            except (ValueError, AttributeError):
                line = event(internal().body()).rstrip(b"\n")
        lines.append(line)
    return b"\n".join(lines)
