"""LLM and AsyncLLM: the front doors. Same engine, same text; one blocks, the other streams."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence as Seq
from typing import Any

from sameseed.config import SpecConfig
from sameseed.engine.build import build_engine
from sameseed.engine.settings import make_config
from sameseed.errors import RequestError, SameseedError
from sameseed.models.runner import ModelRunner
from sameseed.models.weights import Progress
from sameseed.request import Completion, Delta, Grammar, Request, SamplingParams
from sameseed.spec.drafter import Drafter
from sameseed.spec.sampling import derive_seed
from sameseed.tuned import Tuned

log = logging.getLogger("sameseed")
DraftChoice = str | SpecConfig | Drafter | type[Drafter] | None
Prompt = str | Seq[int]
Message = dict[str, str]


def make_requests(
    request_id: str,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    make_grammar: Callable[[], Grammar] | None = None,
    **shared: Any,
) -> list[Request]:
    """The `n` requests of each prompt, numbered in that order; `shared`: further fields of all of them.

    Without a seed one is drawn; all prompts have the same `n` seeds. `make_grammar` makes one for each request.
    """
    seed = secrets.randbelow(2**63) if params.seed is None else params.seed
    made: list[Request] = []
    for prompt in map(tuple, prompts):
        for i in range(params.n):
            grammar = None if make_grammar is None else make_grammar()
            made.append(Request(request_id, prompt, params, derive_seed(seed, i), len(made), grammar=grammar, **shared))
    return made


class _Front:
    """What both doors have: the settings, the engine built from them, its tokenizer."""

    def __init__(
        self,
        model: str | None = None,
        draft: DraftChoice = None,
        *,
        progress: Progress | None = None,
        target: ModelRunner | None = None,
        **settings: Any,
    ) -> None:
        """`target`: of another LLM with the same settings, whose model and cache this one shares, in turns."""
        if (profile := settings.get("profile")) is not None:
            tuned = Tuned.read(profile)
            settings = {**tuned.chosen.settings(), **settings}
            chosen, model = settings.pop("draft", None), model or tuned.model.id
            draft = chosen if draft is None else draft
        model = model or "embedded"
        self.config = make_config(draft, **settings)
        self.engine = build_engine(model, self.config, progress, target)
        self.tokenizer = self.engine.tokenizer
        self._ids = itertools.count()

    def _requests(self, prompt: Prompt, params: SamplingParams, request_id: str) -> list[Request]:
        """The `n` requests of one prompt, checked. Raises RequestError."""
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give at least one token of text")
            text, token_ids = prompt, tuple(self.tokenizer.encode(prompt))
        else:
            text, token_ids = None, tuple(prompt)
        self.engine.check(token_ids)
        return make_requests(request_id, [token_ids], params, prompt=text)


class LLM(_Front):
    """Generates text, blocking. `model` is a folder, a hub id or "embedded" (None); for the rest see `make_config`.

    `profile`: a file of `sameseed tune`, whose model and settings stand where none are given.
    """

    def __init__(self, model: str | None = None, draft: DraftChoice = None, **settings: Any) -> None:
        super().__init__(model, draft, **settings)
        self._mail: dict[str, deque[Delta]] = {}  # request id -> deltas that its stream has not given out yet

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete each prompt (text, or token ids), together; n completions of each, in order of prompt and index.

        Raises RequestError before anything runs if a prompt cannot be served.
        """
        batch: list[Prompt] = _as_list(prompts)
        shared = SamplingParams() if params is None else params
        each = [shared] * len(batch) if isinstance(shared, SamplingParams) else list(shared)
        if len(each) != len(batch):
            raise RequestError(
                f"{len(batch)} prompts but {len(each)} sampling parameters; give one for all, or one each"
            )
        finished: dict[tuple[str, int], Completion] = {}
        requests = [self._requests(prompt, p, f"r{next(self._ids)}") for prompt, p in zip(batch, each, strict=True)]
        for delta in self._run([r for group in requests for r in group]):
            if delta.completion is not None:
                finished[delta.request_id, delta.index] = delta.completion
        return [finished[r.request_id, r.index] for group in requests for r in group]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt, giving out each step's new text; the last delta of each index carries the completion."""
        return self._run(self._requests(prompt, params or SamplingParams(), f"r{next(self._ids)}"))

    def chat(self, messages: Seq[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation of {"role", "content"} messages by the model's chat template."""
        return self.generate([self.tokenizer.chat(messages)], params)[0]

    def chat_stream(self, messages: Seq[Message], params: SamplingParams | None = None) -> Iterator[Delta]:
        """Like `chat`, streaming."""
        return self.stream(self.tokenizer.chat(messages), params)

    def _run(self, requests: list[Request]) -> Iterator[Delta]:
        """Run requests to their end; whatever interrupts it (Ctrl-C, a closed generator), their blocks are freed."""
        mine: deque[Delta] = deque()
        self._mail.update((r.request_id, mine) for r in requests)
        try:
            for request in requests:
                self.engine.add(request)
            open_ends = len(requests)
            while open_ends:
                while not mine:  # a step may serve other streams of this LLM too: each gets its own
                    for delta in self.engine.step():
                        self._mail.get(delta.request_id, mine).append(delta)
                delta = mine.popleft()
                open_ends -= delta.completion is not None
                yield delta
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
                self._mail.pop(request.request_id, None)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], int) else items


class AsyncLLM(_Front):
    """The same engine in a thread of its own: concurrent requests, streaming, cancellation.

    Use it as an async context manager, or call `close` at the end.
    """

    def __init__(self, model: str | None = None, draft: DraftChoice = None, **settings: Any) -> None:
        super().__init__(model, draft, **settings)
        self._inbox: list[Callable[[], object]] = []  # what the engine's thread does before its next step
        self._sinks: dict[str, Callable[[Delta | SameseedError], None]] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="sameseed-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Stream one request: each Delta has the new text; the last one of each index carries its Completion.

        Leaving the loop early (break, cancellation, closing the generator) aborts the request and frees its blocks.
        Raises RequestError for a bad prompt or a request id that is running already.
        """
        params = params or SamplingParams()
        request_id = request_id or f"a{next(self._ids)}"
        if request_id in self._sinks:
            raise RequestError(f"request id {request_id!r} is running already; choose another")
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Delta | SameseedError] = asyncio.Queue()
        self._sinks[request_id] = lambda item: _put(loop, queue, item)  # from here on the id is taken
        try:
            requests = await asyncio.to_thread(self._requests, prompt, params, request_id)
            if not self._post(lambda: self._add(requests)):
                raise RequestError("this engine is closed; make a new AsyncLLM")
            open_ends = len(requests)
            while open_ends:
                item = await queue.get()
                if isinstance(item, SameseedError):
                    raise item
                open_ends -= item.completion is not None
                yield item
        finally:
            self._sinks.pop(request_id, None)
            self._post(lambda: self.engine.abort(request_id))

    async def chat(
        self, messages: Seq[Message], params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Like `generate`, for a conversation."""
        async for delta in self.generate(self.tokenizer.chat(messages), params, request_id):
            yield delta

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Run one request to its end and return its (first) completion."""
        done: Completion | None = None
        async for delta in self.generate(prompt, params):
            if delta.completion is not None and delta.index == 0:
                done = delta.completion
        assert done is not None
        return done

    def abort(self, request_id: str) -> None:
        """End a request from outside; its stream gets a last delta with finish reason "abort"."""
        self._post(lambda: self._send(self.engine.abort(request_id)))

    def close(self) -> None:
        """Stop the engine's thread after its current step; running requests end with an error."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def _add(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.add(request)

    def _post(self, action: Callable[[], object]) -> bool:
        """Let the engine's thread do this before its next step; False if the engine is closed."""
        with self._wake:
            if self._closing:
                return False
            self._inbox.append(action)
            self._wake.notify()
            return True

    def _send(self, deltas: Seq[Delta]) -> None:
        for delta in deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is not None:
                sink(delta)

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
                    self._send(self.engine.step())
            except Exception as error:  # whatever it was: no stream may wait for ever
                log.exception("a step of the engine failed")
                self._end_all(SameseedError(f"the engine failed while this request ran: {error!r}"))
        self._end_all(SameseedError("the engine was closed while this request ran"))

    def _end_all(self, error: SameseedError) -> None:
        """End every open request with this error; their blocks are free again."""
        for request_id, sink in list(self._sinks.items()):
            self.engine.abort(request_id)
            sink(error)


def _put(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Any], item: object) -> None:
    try:
        loop.call_soon_threadsafe(queue.put_nowait, item)
    except RuntimeError:  # the caller's event loop is gone, and nobody waits for this any more
        return
