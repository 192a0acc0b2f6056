"""Texts that a target wrote by plain decoding, sampled as the user samples, each up to its natural end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from sameseed.engine.engine import Engine
from sameseed.errors import ConfigError, RequestError
from sameseed.measure.bench import Run, run_batch
from sameseed.measure.workload import Workload
from sameseed.request import SamplingParams
from sameseed.store import Arrays

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
    jobs, run, ended = prompts_of(workload), Run(), count(1)
    for prompt, _ in jobs:
        engine.check(prompt)
    run_batch(engine, jobs, run, lambda: tick(next(ended), len(jobs)))
    for i, done in enumerate(run.completions, 1):
        if done.finish_reason.value == "error":
            raise RequestError(f"prompt {i} of the workload could not be answered; leave it out")
    pairs = zip(jobs, run.completions, strict=True)
    texts = (Text(prompt, done.token_ids, params, done.seed) for (prompt, params), done in pairs)
    return Texts(tuple(texts), key)


def read_texts(workload: Workload, arrays: Arrays, key: str) -> Texts:
    """The inverse of `as_arrays`, for the same workload."""
    pieces = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
    jobs = zip(prompts_of(workload), pieces, strict=True)
    return Texts(tuple(Text(p, tuple(t.tolist()), params, params.seed or 0) for (p, params), t in jobs), key)
