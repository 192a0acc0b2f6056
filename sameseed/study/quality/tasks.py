"""Tasks: questions of a data set, answers of a model, a score for each. What the tasks share is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
from sameseed.request import MAX_SEED, SamplingParams
from sameseed.study.measure import Run, run_batch
from sameseed.study.quality.bootstrap import Interval, estimate, mean_interval

Report = Callable[[str, int, int], None]  # stage, done, total


def silent(stage: str, done: int, total: int) -> None:
    """Reports nothing."""


@dataclass(frozen=True)
class TaskSettings:
    """What all tasks obey: where data are (None: the hub), how many questions, how answers are written.

    `chat` puts each prompt into the model's chat template, as one message of the user. `max_tokens` None is each task's
    own. `seed` is that of sampled answers and of the intervals.
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
        """Of a task whose own length and stop strings these are."""
        return SamplingParams(
            max_tokens=self.max_tokens or max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=() if self.chat else stop,
        )


@dataclass(frozen=True)
class TaskResult:
    """What a task found: `scores`, one a question in the data's order, 0 to 1; `extra` says more, by name."""

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
        """For a record."""
        found = {"task": self.task, "metric": self.metric, **estimate(self.value, self.interval(seed))}
        return {**found, "num_questions": len(self.scores), **self.extra, "notes": list(self.notes)}


def counter(report: Callable[[int, int], None], total: int) -> Callable[[], None]:
    """A tick that reports how many ticks there were, of how many."""
    done = count(1)
    return lambda: report(next(done), total)


def answer(
    llm: LLM, prompts: Seq[Seq[int]], params: Seq[SamplingParams], report: Callable[[int, int], None]
) -> list[str]:
    """What the model writes after each prompt, all together by continuous batching; "" after an empty prompt.

    Each prompt has a seed of its own, so that an answer does not depend on how many questions were asked.
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
