"""LLM: the blocking API. AsyncLLM (async_llm.py) is the asyncio API with the same engine and the same texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from threading import RLock
from typing import Any, overload

from sameseed.engine.front import Front, Message, Prompt, as_list
from sameseed.errors import RequestError
from sameseed.request import Completion, Delta, Request, SamplingParams


class LLM(Front):
    """Generates text, blocking. `model` is a folder, a hub id or "embedded" (None); for the rest see `make_config`.

    `profile`: a file of `sameseed tune`; its model and settings are used where none are given. Argument names of vLLM,
    transformers and llama.cpp are translated, or refused with the right name (docs/guides/coming-from.md).
    """

    def _start(self) -> None:
        self._mail: dict[str, deque[Delta]] = {}  # request id -> deltas not yielded by its stream yet
        self._turn = RLock()  # of threads at the engine; reentrant: a stream may be freed, and so end, within a step

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None, **sampling: Any
    ) -> list[Completion]:
        """Complete all prompts (text or token ids) together; n completions of each, in order of prompt and index.

        `sampling`: keywords of SamplingParams, in place of `params`. Raises RequestError before anything runs if a
        prompt cannot be served.
        """
        batch = as_list(prompts)
        several: Any = params if params is not None else sampling.pop("sampling_params", None)
        if isinstance(several, list | tuple):
            each = [self._params(p, sampling) for p in several]
        else:
            each = [self._params(several, sampling)] * len(batch)
        if len(each) != len(batch):
            raise RequestError(
                f"{len(batch)} prompts but {len(each)} sampling parameters; give one for all, or one each"
            )
        finished: dict[tuple[str, int], Completion] = {}
        pairs = zip(batch, map(self._seeded, each), strict=True)
        requests = [self._requests(prompt, p, f"r{next(self._ids)}") for prompt, p in pairs]
        for delta in self._run([replace(r, streamed=False) for group in requests for r in group]):
            if delta.completion is not None:
                finished[delta.request_id, delta.index] = delta.completion
        return [finished[r.request_id, r.index] for group in requests for r in group]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any) -> Iterator[Delta]:
        """Complete one prompt and yield each step's new text; the last delta of each index carries the completion."""
        params = self._seeded(self._params(params, sampling))
        return self._run(self._requests(prompt, params, f"r{next(self._ids)}"))

    @overload
    def chat(self, messages: Seq[Message], params: SamplingParams | None = None, **sampling: Any) -> Completion: ...
    @overload
    def chat(
        self, messages: Seq[Seq[Message]], params: SamplingParams | Seq[SamplingParams] | None = None, **sampling: Any
    ) -> list[Completion]: ...
    def chat(self, messages: Any, params: Any = None, **sampling: Any) -> Completion | list[Completion]:
        """Answer a conversation of {"role", "content"} messages with the model's chat template.

        A list of conversations gives a list of completions, as `generate` does.
        """
        if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
            return self.generate([self.tokenizer.chat(m) for m in messages], params, **sampling)
        chosen = self._params(params, sampling)
        if chosen.n > 1:
            raise RequestError(f"n={chosen.n} answers to one conversation: chat([messages]) gives them as a list")
        return self.generate([self.tokenizer.chat(messages)], chosen)[0]

    def chat_stream(
        self, messages: Seq[Message], params: SamplingParams | None = None, **sampling: Any
    ) -> Iterator[Delta]:
        """Like `chat`, streaming."""
        return self.stream(self.tokenizer.chat(messages), params, **sampling)

    def close(self) -> None:
        """Free the model and its memory; an open stream may still be read to its end."""
        if "engine" in vars(self):
            del self.engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, requests: list[Request]) -> Iterator[Delta]:
        """Run requests to their end. Blocks are freed even if this is interrupted (Ctrl-C, a closed generator)."""
        engine, mine = self.engine, deque[Delta]()
        try:
            with self._turn:
                self._mail.update((r.request_id, mine) for r in requests)
                for request in requests:
                    engine.add(request)
            open_ends = len(requests)
            while open_ends:
                with self._turn:
                    while not mine:  # a step may serve other open streams too: each gets its own deltas
                        for delta in engine.step():
                            self._mail.get(delta.request_id, mine).append(delta)
                delta = mine.popleft()
                open_ends -= delta.completion is not None
                yield delta
        finally:
            with self._turn:
                for request in requests:
                    engine.abort(request.request_id)
                    self._mail.pop(request.request_id, None)
