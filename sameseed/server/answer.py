"""Answer: the ASGI response of a route that writes text. Whole or as events; ends early when the client leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sameseed.server.errors import ApiError, internal
from sameseed.server.frames import Piece
from sameseed.server.gate import Ticket
from sameseed.server.metrics import ServerMetrics
from sameseed.server.replies import Reply
from sameseed.server.stream import Stream

log = logging.getLogger("sameseed.server")
INLINE = 256  # tokens with log-probabilities that are written out on the event loop; more keep a thread busy
GRACE = 5.0  # seconds that a client has to read why it was cut off
LEFT = 499  # what is counted where the client left
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """Runs one stream until it ends, time is up or the client leaves; always gives back its ticket."""

    def __init__(
        self,
        reply: Reply,
        stream: Stream,
        ticket: Ticket,
        metrics: ServerMetrics,
        *,
        events: bool,
        usage: bool,
        timeout: float,
    ) -> None:
        """`events`: as a stream; `usage`: with counts at its end; `timeout`: seconds since it arrived."""
        super().__init__()
        self._reply, self._stream, self._ticket, self._metrics = reply, stream, ticket, metrics
        self._events, self._usage, self._timeout = events, usage, timeout
        self._arrived = 0.0
        self._first: float | None = None
        self._last = 0.0
        self._gone = False
        self._cut_off = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._arrived = scope["sameseed"].arrived
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        watcher = loop.create_task(self._watch(receive))
        left = self._timeout - (time.monotonic() - self._arrived)  # it began to count before there was an answer
        deadline = loop.call_later(max(0.0, left), self._expire, task)
        status = LEFT
        try:
            status = await (self._as_events if self._events else self._as_whole)(scope, receive, send)
        except asyncio.CancelledError:
            if not self._cut_off:
                raise
        finally:
            deadline.cancel()
            watcher.cancel()
            self._stream.leave()
            self._ticket.close()
            self._record(scope, LEFT if self._gone else status)

    async def _watch(self, receive: Receive) -> None:
        """The client has left: the engine stops within a step."""
        await client_left(receive)
        self._gone = True
        self._stream.leave()

    def _expire(self, task: asyncio.Task[Any] | None) -> None:
        """Time is up: say so, and leave also if nobody reads that."""
        self._stream.leave(too_late(self._timeout))
        self._cut_off = True
        if task is not None:
            asyncio.get_running_loop().call_later(GRACE, task.cancel)

    async def _as_whole(self, scope: Scope, receive: Receive, send: Send) -> int:
        try:
            async for piece in self._stream.pieces():
                self._take(piece)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return error.status
        if self._gone:
            return LEFT
        reply = self._reply
        if reply.num_scored <= INLINE:
            response = JSONResponse(reply.body())
        else:
            response = await asyncio.to_thread(lambda: JSONResponse(reply.body()))
        await response(scope, receive, send)
        return 200

    async def _as_events(self, scope: Scope, receive: Receive, send: Send) -> int:
        reply, started = self._reply, False

        async def write(events: Iterator[bytes], more: bool = True) -> None:
            data = b"".join(events)
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for piece in self._stream.pieces():
                self._take(piece)
                if not started:  # until here an error still has a status of its own
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _SSE})
                    await write(reply.begin())
                if len(piece.prompt_logprobs) <= INLINE:
                    await write(reply.events(piece))
                else:
                    await write(iter(await asyncio.to_thread(list, reply.events(piece))))
        except ApiError as error:
            if not started:
                await error_response(error)(scope, receive, send)
                return error.status
            await write(reply.fail(error), more=False)
            return error.status
        except Exception:
            if not started:
                raise
            log.exception("a stream failed", extra={"request_id": reply.id})
            await write(reply.fail(internal()), more=False)
            return 500
        if self._gone:
            return LEFT
        await write(reply.end(self._usage), more=False)
        return 200

    def _take(self, piece: Piece) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._metrics.first_token.observe(now - self._arrived)
        else:
            self._metrics.between.observe(now - self._last)
        self._last = now
        self._reply.take(piece)

    def _record(self, scope: Scope, status: int) -> None:
        """Count and log what became of the request."""
        metrics, reply, now = self._metrics, self._reply, time.monotonic()
        num_tokens, took = reply.num_output_tokens, now - self._arrived
        metrics.generation_tokens.inc(num_tokens)
        metrics.prompt_tokens.inc(reply.num_prompt_tokens)
        for choice in reply.choices:
            if choice.finish_reason is not None:
                metrics.completed(choice.finish_reason)
            if choice.completion is not None:
                metrics.timed(choice.completion["metrics"])
        if status == 200:
            metrics.whole.observe(took)
            if num_tokens > len(reply.choices) and self._first is not None:
                metrics.per_token.observe((now - self._first) / (num_tokens - len(reply.choices)))
        scope["sameseed"].outcome = status
        first = None if self._first is None else round((self._first - self._arrived) * 1e3, 1)
        log.info(
            "answered",
            extra={
                "request_id": reply.id,
                "client_request_id": scope["sameseed"].client_id,
                "status": status,
                "prompt_tokens": reply.num_prompt_tokens,
                "output_tokens": num_tokens,
                "first_token_ms": first,
                "total_ms": round(took * 1e3, 1),
            },
        )


async def client_left(receive: Receive) -> None:
    """Until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def too_late(timeout: float) -> ApiError:
    """408."""
    return ApiError(408, f"the request took longer than {timeout:g} s", code="timeout")


def error_response(error: ApiError) -> JSONResponse:
    """An error as a response, the same for every route."""
    return JSONResponse(error.body(), error.status, error.headers())
