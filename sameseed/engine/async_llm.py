"""AsyncLLM: the API for asyncio, with the engine in its own thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence as Seq
from typing import Any

from sameseed.engine.llm import Front, Message, Prompt
from sameseed.errors import RequestError, SameseedError
from sameseed.request import Completion, Delta, Request, SamplingParams

log = logging.getLogger("sameseed")


class _Sink:
    """Takes a request's deltas from the engine's thread to the event loop that waits for them."""

    def __init__(self) -> None:
        # For the engine's thread. Before the request has begun, deltas are of an earlier one with its id.
        self.begun = self.aborted = False
        self.queue: asyncio.Queue[Delta | SameseedError] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, item: Delta | SameseedError) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so nothing waits for this item
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncLLM(Front):
    """An engine in its own thread: concurrent requests, streaming, cancellation. Close it, or use `async with`."""

    def _start(self) -> None:
        self._inbox: list[Callable[[], object]] = []  # actions for the engine's thread before its next step
        self._sinks: dict[str, _Sink] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="sameseed-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # if the user does not: a thread still running at Python's exit leaks its engine

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None, **sampling: Any
    ) -> AsyncIterator[Delta]:
        """Stream one request: each Delta has the new text; the last one of each index carries its Completion.

        `sampling`: keywords of SamplingParams, in place of `params`. Leaving the loop early (break, cancellation,
        closing the generator) aborts the request. Raises RequestError for a bad prompt or a request id that is running
        already.
        """
        chosen = self._seeded(self._params(params, sampling))
        request_id = request_id or f"a{next(self._ids)}"
        if request_id in self._sinks:
            raise RequestError(f"request id {request_id!r} is running already; choose another")
        sink = self._sinks[request_id] = _Sink()  # from here on the id is taken
        try:
            requests = await asyncio.to_thread(self._requests, prompt, chosen, request_id)
            if not self._post(lambda: self._begin(sink, requests)):
                raise RequestError("this engine is closed; make a new AsyncLLM")
            open_ends = len(requests)
            while open_ends:
                item = await sink.queue.get()
                if isinstance(item, SameseedError):
                    raise item
                open_ends -= item.completion is not None
                yield item
        finally:
            self._sinks.pop(request_id, None)
            self._post(lambda: self.engine.abort(request_id))

    async def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Delta]:
        """Like `generate`, for a conversation."""
        async for delta in self.generate(self.tokenizer.chat(messages), params, request_id, **sampling):
            yield delta

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any) -> Completion:
        """Run one request to its end and return its (first) completion."""
        done: Completion | None = None
        async for delta in self.generate(prompt, params, **sampling):
            if delta.completion is not None and delta.index == 0:
                done = delta.completion
        assert done is not None
        return done

    def abort(self, request_id: str) -> None:
        """End a request early; its stream gets a last delta with finish reason "abort"."""
        self._post(lambda: self._abort(request_id))

    def close(self) -> None:
        """Stop the engine's thread after its current step; running requests end with an error."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        atexit.unregister(self.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def _post(self, action: Callable[[], object]) -> bool:
        """Queue an action for the engine's thread before its next step; False if the engine is closed."""
        with self._wake:
            if self._closing:
                return False
            self._inbox.append(action)
            self._wake.notify()
            return True

    def _begin(self, sink: _Sink, requests: Seq[Request]) -> None:
        sink.begun = True
        for request in requests:
            self.engine.add(request)
        if sink.aborted:  # while its prompt was being tokenized
            self._abort(requests[0].request_id)

    def _abort(self, request_id: str) -> None:
        if (sink := self._sinks.get(request_id)) is not None:
            sink.aborted = True
        self._send(self.engine.abort(request_id))

    def _send(self, deltas: Seq[Delta]) -> None:
        for delta in deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is not None and sink.begun:
                sink.put(delta)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and not self.engine.has_work and not self._closing:
                    self._wake.wait()
                actions, self._inbox = self._inbox, []
                closing = self._closing
            try:
                for action in actions:
                    action()
                if closing:
                    break
                if self.engine.has_work:
                    self._send(self.engine.step(self._send))
            except Exception as error:  # any error: no stream may wait forever
                log.exception("a step of the engine failed")
                self._end_all(SameseedError(f"the engine failed while this request ran: {error!r}"))
        self._end_all(SameseedError("the engine was closed while this request ran"))

    def _end_all(self, error: SameseedError) -> None:
        """End every open request with this error, and free its cache blocks."""
        for request_id, sink in list(self._sinks.items()):
            self.engine.abort(request_id)
            sink.put(error)
