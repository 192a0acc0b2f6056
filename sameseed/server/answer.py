"""ASGI responses of the routes that generate text: one body or a stream. They end early if the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from sameseed.errors import reason
from sameseed.server import limits
from sameseed.server.client import Stream
from sameseed.server.connection import cut
from sameseed.server.errors import ApiError, error_response, internal
from sameseed.server.gate import Ticket
from sameseed.server.metrics import ServerMetrics
from sameseed.server.replies import Reply

log = logging.getLogger("sameseed.server")
INLINE = 256  # most tokens with log-probabilities that are serialized on the event loop; more: in a thread
GRACE = 5.0  # seconds for a client to read an error before its connection is cut
QUIET = 1.0  # seconds without an event after which a stream sends a comment: only writing shows who has left
LEFT = 499  # status that is counted if the client disconnected
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answering(Response):
    """Base: sends one answer until it ends, times out or its client disconnects. Always releases its ticket."""

    def __init__(self, ticket: Ticket, timeout: float) -> None:
        """`timeout`: seconds for the request, from its arrival."""
        super().__init__()
        self._ticket, self._timeout = ticket, timeout
        self._stopped: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._status = 0  # of the response that has begun; 0: none has
        self._streaming = False  # has a stream of events begun?

    def leave(self, error: ApiError) -> None:
        if not self._stopped.done():
            self._stopped.set_result(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit, loop, status, sent = scope["sameseed"], asyncio.get_running_loop(), LEFT, math.inf

        async def write(message: Message) -> None:
            nonlocal sent
            sent = math.inf
            await send(message)
            sent = time.monotonic()

        async def remind() -> None:
            while True:
                await asyncio.sleep(QUIET)
                if self._streaming and time.monotonic() - sent > QUIET:
                    await write({"type": "http.response.body", "body": b":\n\n", "more_body": True})

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        watcher = loop.create_task(watch())
        reminder = loop.create_task(remind())
        work = loop.create_task(self._work(scope, receive, write))
        left = max(0.0, self._timeout - (time.monotonic() - visit.arrived))
        error: ApiError | None = None
        try:
            await asyncio.wait((work, watcher, self._stopped), timeout=left, return_when="FIRST_COMPLETED")
            if not work.done() and watcher.done():
                return
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                error = self._stopped.result() if self._stopped.done() else too_late(self._timeout)
            elif (fault := work.exception()) is None or isinstance(fault, ApiError):
                error = fault
            else:
                log.error("a request failed", exc_info=fault, extra={"request_id": visit.id})
                error = internal(reason(fault))
            status = self._status if error is None else error.status
            if error is not None and not await self._tell(error, scope, receive, write):
                await cut(scope)
        finally:
            work.cancel()
            watcher.cancel()
            reminder.cancel()
            visit.outcome, took = status, time.monotonic() - visit.arrived
            self._ticket.close()
            told = {"request_id": visit.id, "client_request_id": visit.client_id, "status": status}
            told |= {} if error is None else {"error": error.message}
            told |= {"total_ms": round(took * 1e3, 1), **self._ended(status, took)}
            log.info("answered", extra=told)
            await asyncio.gather(work, watcher, reminder, return_exceptions=True)

    async def _tell(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> bool:
        """Send the error to the client. False if the client does not read, or if half of a plain body was sent."""
        if not self._status:
            telling: Awaitable[None] = error_response(error, scope["sameseed"])(scope, receive, send)
        elif (last := self._last(error, scope["sameseed"].shown_id)) is not None:
            telling = send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            return False
        try:
            await asyncio.wait_for(telling, GRACE)
        except asyncio.TimeoutError:
            return False
        return True

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises ApiError for an error to send instead, or at the end of a stream."""
        raise NotImplementedError

    def _last(self, error: ApiError, request_id: str) -> bytes | None:
        """Bytes that end a body that has begun with this error; None if the body cannot hold an error."""
        raise NotImplementedError

    def _ended(self, status: int, took: float) -> dict[str, Any]:
        """Count an answer that took `took` seconds; returns more fields for its log line."""
        return {}


class Answer(Answering):
    """Sends the output of one stream of the engine."""

    def __init__(self, reply: Reply, stream: Stream, ticket: Ticket, metrics: ServerMetrics, timeout: float) -> None:
        super().__init__(ticket, timeout)
        self._reply, self._stream, self._metrics = reply, stream, metrics
        self._events = bool(reply.fields.stream)  # send a stream of events, not one body
        self._first: float | None = None  # seconds to the first piece

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, metrics, latest = self._reply, self._metrics, scope["sameseed"].arrived

        async def write(events: Iterable[bytes], more: bool = True) -> None:
            data = b"".join(events)
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for piece in self._stream.pieces():
                choice = reply.take(piece)
                if not piece.token_ids and piece.completion is None:  # scores of the prompt alone
                    continue
                gap = time.monotonic() - latest
                latest += gap
                (metrics.first_token if self._first is None else metrics.between).observe(gap)
                self._first = gap if self._first is None else self._first
                if not self._events:
                    continue
                if not self._status:  # before this, an error can still have its own status
                    self._status, self._streaming = 200, True
                    await send({"type": "http.response.start", "status": 200, "headers": _SSE})
                    await write(reply.begin())
                many = len(choice.prompt_logprobs) > INLINE
                await write(await limits.away(many, partial(list, reply.events(piece)), None))
        finally:
            self._stream.leave()
        if self._events:
            await write(reply.end(), more=False)
        else:
            num_shown = sum(len(c.logprobs) + len(c.prompt_logprobs) for c in reply.choices)
            many = num_shown + reply.show_tokens * reply.num_prompt_tokens > INLINE
            body = await limits.away(many, lambda: JSONResponse(reply.body()), None)
            self._status = 200
            await body(scope, receive, send)

    def _last(self, error: ApiError, request_id: str) -> bytes | None:
        return b"".join(self._reply.fail(error, request_id)) if self._events else None

    def _ended(self, status: int, took: float) -> dict[str, Any]:
        metrics, reply, num_tokens = self._metrics, self._reply, self._reply.num_output_tokens
        self._stream.leave()  # also if the work never began
        metrics.ended(reply)
        first = self._first
        if status == 200:
            metrics.whole.observe(took)
            if num_tokens > len(reply.choices) and first is not None:
                metrics.per_token.observe((took - first) / (num_tokens - len(reply.choices)))
        counts = {"prompt_tokens": reply.num_prompt_tokens, "output_tokens": num_tokens}
        return {"request_id": reply.id, **counts, "first_token_ms": None if first is None else round(first * 1e3, 1)}


def too_late(timeout: float) -> ApiError:
    """The error 408: the request took too long."""
    remedy = "ask for fewer tokens, or start the server with a longer --request-timeout"
    return ApiError(408, f"the request took longer than {timeout:g} s; {remedy}", code="timeout")
