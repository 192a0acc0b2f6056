"""What all tasks share. A task asks a model the questions of a data set, and scores each answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
from sameseed.measure.bench import Run, run_batch
from sameseed.measure.quality.bootstrap import Interval, estimate, mean_interval
from sameseed.request import MAX_SEED, SamplingParams

Report = Callable[[str, int, int], None]  # stage, done, total


def silent(stage: str, done: int, total: int) -> None:
    """A progress report that does nothing."""


@dataclass(frozen=True)
class TaskSettings:
    """Settings of all tasks: folder of the data (None: the hub), number of questions, how answers are generated.

    `chat`: put each prompt into the model's chat template, as one user message. `max_tokens` None: each task's own
    limit. `seed`: of sampled answers and of the bootstrap intervals.
    """

    data: Path | None = None
    limit: int | None = None
    chat: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit must be at least 1, got {self.limit}")

    def params(self, max_tokens: int, stop: tuple[str, ...]) -> SamplingParams:
        """Sampling parameters for a task with its own length limit `max_tokens` and stop strings `stop`."""
        return SamplingParams(
            max_tokens=self.max_tokens or max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=() if self.chat else stop,
        )


@dataclass(frozen=True)
class TaskResult:
    """Result of a task. `scores`: one per question, in the data's order, 0 to 1. `extra`: further values by name."""

    task: str
    metric: str
    scores: tuple[float, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def value(self) -> float:
        return sum(self.scores) / len(self.scores)

    def interval(self, seed: int) -> Interval | None:
        return mean_interval(self.scores, seed)

    def as_dict(self, seed: int) -> dict[str, Any]:
        """Plain data for a record. `seed`: of the bootstrap interval."""
        found = {"task": self.task, "metric": self.metric, **estimate(self.value, self.interval(seed))}
        return {**found, "num_questions": len(self.scores), **self.extra, "notes": list(self.notes)}


def counter(report: Callable[[int, int], None], total: int) -> Callable[[], None]:
    """A function that calls `report(number of calls so far, total)` at each call."""
    done = count(1)
    return lambda: report(next(done), total)


def answer(
    llm: LLM, prompts: Seq[Seq[int]], params: Seq[SamplingParams], report: Callable[[int, int], None]
) -> list[str]:
    """The model's answer to each prompt, generated together by continuous batching; "" for an empty prompt.

    Each prompt has its own seed, so that an answer does not depend on the number of questions.
    """
    jobs = [
        (tuple(prompt), replace(its, seed=((its.seed or 0) + i) % (MAX_SEED + 1)))
        for i, (prompt, its) in enumerate(zip(prompts, params, strict=True))
        if prompt
    ]
    run = Run()
    run_batch(llm.engine, jobs, run, counter(report, len(jobs)))
    texts = iter(c.text for c in run.completions)
    return [next(texts) if p else "" for p in prompts]
