"""Texts that a target wrote by plain decoding, sampled as the user samples, each up to its natural end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass

import numpy as np

from sameseed.engine.engine import Engine
from sameseed.errors import ConfigError, RequestError
from sameseed.measure.workload import Workload
from sameseed.request import Request, SamplingParams
from sameseed.store import Arrays, numbers

Tick = Callable[[int, int], None]  # (number done, total)


@dataclass(frozen=True)
class Text:
    """One prompt and what the target wrote after it, end token included."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class Texts:
    """Texts of one target for a workload, in the order of its prompts; `key`: a digest of all that they depend on."""

    items: tuple[Text, ...]
    key: str = ""

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Text]:
        return iter(self.items)

    @property
    def longest(self) -> int:
        """Tokens of the longest text, prompt included."""
        return max(len(t.prompt) + len(t.tokens) for t in self.items)

    def as_arrays(self) -> Arrays:
        """The arrays that the store keeps: the generated tokens, one text after the other, and their numbers."""
        return {
            "tokens": np.array([t for text in self for t in text.tokens], np.int32),
            "lengths": np.array([len(text.tokens) for text in self], np.int32),
        }


def prompts_of(workload: Workload) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Prompts with their parameters, each with its own seed.

    Raises ConfigError where nothing could be learned: no prompts, or texts that do not end by themselves.
    """
    if not workload.prompts:
        raise ConfigError("there are no prompts to write texts for; give some, e.g. --prompts FILE")
    if workload.params.ignore_eos:
        raise ConfigError(
            "texts that run past their end (ignore_eos) say nothing about what drafts are worth; leave it out"
        )
    return [job for batch in workload.batches() for job in batch]


def write_texts(engine: Engine, workload: Workload, key: str = "", tick: Tick = lambda done, total: None) -> Texts:
    """Write a text for each prompt with an engine that decodes plainly, as many together as it may run.

    Raises RequestError for a prompt that does not fit, or where choosing a token failed.
    """
    jobs = prompts_of(workload)
    for prompt, _ in jobs:
        engine.check(prompt)
    written: dict[int, Text] = {}
    try:
        for i, (prompt, params) in enumerate(jobs):
            seed = params.seed or 0
            engine.add(Request("texts", prompt, params, seed, i))
        while engine.has_work:
            for delta in engine.step():
                if delta.completion is None:
                    continue
                done, (prompt, params) = delta.completion, jobs[delta.index]
                if done.finish_reason.value == "error":
                    raise RequestError(f"prompt {delta.index + 1} of the workload could not be answered; leave it out")
                written[delta.index] = Text(prompt, done.token_ids, params, done.seed)
                tick(len(written), len(jobs))
    finally:
        engine.abort("texts")
    return Texts(tuple(written[i] for i in range(len(jobs))), key)


def read_texts(workload: Workload, arrays: Arrays, key: str, vocab_size: int) -> Texts:
    """The inverse of `as_arrays`, for the same workload and model. Raises ValueError for arrays of other texts."""
    jobs = prompts_of(workload)
    lengths = numbers(arrays.get("lengths"), "lengths", (len(jobs),), 1, 2**31).astype(np.int64)
    tokens = numbers(arrays.get("tokens"), "tokens", (int(lengths.sum()),), 0, vocab_size - 1).astype(np.int32)
    pieces: Seq[list[int]] = [piece.tolist() for piece in np.split(tokens, np.cumsum(lengths)[:-1])]
    texts = (Text(p, tuple(t), params, params.seed or 0) for (p, params), t in zip(jobs, pieces, strict=True))
    return Texts(tuple(texts), key)
