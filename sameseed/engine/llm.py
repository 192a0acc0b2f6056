"""LLM: the blocking API, and what it shares with AsyncLLM (async_llm.py): settings, engine and requests."""

from __future__ import annotations

import itertools
import os
import random
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import replace
from numbers import Integral
from threading import RLock
from typing import TYPE_CHECKING, Any, overload

from sameseed import fields, habits
from sameseed.engine.build import build_engine
from sameseed.engine.engine import Engine
from sameseed.engine.settings import AsyncEngineArgs, DraftChoice, Settings, make_config
from sameseed.errors import RequestError
from sameseed.models.runner import ModelRunner
from sameseed.models.weights import Progress
from sameseed.request import MAX_SEED, Completion, Delta, Grammar, Request, SamplingParams
from sameseed.spec.sampling import derive_seed
from sameseed.tokenizer import Tokenizer
from sameseed.tuned import Tuned

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Prompt = str | Seq[int] | Mapping[str, Any]
Message = Mapping[str, str]


def make_requests(
    request_id: str,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    make_grammar: Callable[[], Grammar] | None = None,
    **shared: Any,
) -> list[Request]:
    """The `n` requests of each prompt, numbered in that order; `shared`: further fields of all requests.

    Without a seed each prompt draws its own. `make_grammar` makes a grammar for each request.
    """
    requests: list[Request] = []
    for prompt in map(tuple, prompts):
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        for own in (derive_seed(seed, i) for i in range(params.n)):
            grammar = make_grammar and make_grammar()
            requests.append(Request(request_id, prompt, params, own, len(requests), grammar=grammar, **shared))
    return requests


class Front(habits.Hinted):
    """What LLM and AsyncLLM have in common: the settings, the engine built from them, and its tokenizer."""

    engine: Engine

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        draft: DraftChoice | os.PathLike[str] = None,
        *,
        progress: Progress | None = None,
        target: ModelRunner | None = None,
        seed: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        """`target`: runner of another LLM with the same settings; both share its model and cache, and must take turns.

        `seed`: requests without a seed draw theirs from a generator with this seed, in order; None: from the system.
        """
        given = habits.settings({"model": model, "draft": draft, **settings})
        if (profile := given.get("profile")) is not None:
            tuned = Tuned.read(profile)
            said = {k: v for k, v in given.items() if v is not None or k not in ("model", "draft")}
            given = {"model": tuned.model.id, **tuned.chosen.settings(), **said}
        own = fields.value_of(str | None, given.pop("model"), "model")
        self.config = make_config(**given)
        self.engine = build_engine("embedded" if own is None else own, self.config, progress, target)
        self.tokenizer = self.engine.tokenizer
        self._ids = itertools.count()
        self._draw = secrets.randbelow if seed is None else random.Random(seed).randrange
        self._start()

    def _start(self) -> None:
        """Set up what the subclass needs besides."""
        raise NotImplementedError

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs) -> Self:
        """An object made with these keyword arguments, as in vLLM."""
        return cls(**args)

    @classmethod
    def from_pretrained(cls, model: str | None = None, **settings: Any) -> Self:
        """The same as calling the class, as in transformers."""
        return cls(model, **settings)

    def get_tokenizer(self) -> Tokenizer:
        """`tokenizer`, as a method, as in vLLM."""
        return self.tokenizer

    def _params(self, params: SamplingParams | None, given: Mapping[str, Any]) -> SamplingParams:
        """A request's parameters, from an argument or from keywords. Raises RequestError."""
        given = habits.translate(given, habits.GENERATE, RequestError)
        found = [p for p in (params, given.pop("params", None)) if p is not None]
        if not found:
            return SamplingParams(**given)
        if len(found) > 1 or given:
            raise RequestError(f"params and {', '.join(given) or 'sampling_params'} are given; give one of them")
        if not isinstance(found[0], SamplingParams):
            raise RequestError(f"params must be SamplingParams(max_tokens=..., ...), got {found[0]!r}")
        return found[0]

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        return params if params.seed is not None else replace(params, seed=self._draw(MAX_SEED + 1))

    def _requests(self, prompt: Prompt, params: SamplingParams, request_id: str) -> list[Request]:
        """The `n` requests of one prompt, checked. Raises RequestError."""
        if "engine" not in vars(self):
            raise RequestError("this LLM is closed; make a new one")
        plain = _plain(prompt)
        text, token_ids = (plain, self.tokenizer.encode(plain)) if isinstance(plain, str) else (None, plain)
        self.engine.check(tuple(token_ids), params)
        return make_requests(request_id, [token_ids], params, prompt=text)


def _plain(prompt: Any) -> str | list[int]:
    """A prompt as text or as token ids. Raises RequestError for anything else."""
    if isinstance(prompt, Mapping):
        if not prompt.keys() & {"prompt", "prompt_token_ids"} or prompt.keys() - {"prompt", "prompt_token_ids"}:
            raise RequestError(
                'a prompt as a dict is {"prompt": text} or {"prompt_token_ids": [...]}; messages are for chat'
            )
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt")
    prompt = getattr(prompt, "tolist", lambda: prompt)()
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, str | Seq) and not prompt:
        raise RequestError("the prompt is empty; give at least one token of text")
    if not isinstance(prompt, Seq) or isinstance(prompt, bytes) or not all(isinstance(t, Integral) for t in prompt):
        raise RequestError(f"a prompt is text or a list of token ids, got {str(prompt)[:60]}")
    return list(map(int, prompt))


def as_list(prompts: Any) -> list[Prompt]:
    """A list of prompts, from one prompt or several."""
    items = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        return [items]
    items = list(items)
    return [items] if items and isinstance(items[0], Integral) else items


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

        `sampling`: keywords of SamplingParams, in place of `params`. Raises RequestError before anything runs.
        """
        batch = as_list(prompts)
        several: Any = params if params is not None else sampling.pop("sampling_params", None)
        if isinstance(several, list | tuple):
            each = [self._params(p, sampling) for p in several]
        else:
            each = [self._params(several, sampling)] * len(batch)
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts but {len(each)} sampling parameters; give one, or one each")
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
