"""Speed and acceptance of variants: all are loaded, and take turns at every batch, so that a drift hits all alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from sameseed.config import SpecConfig
from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, RequestError, VocabularyError
from sameseed.models.draft_format import is_smaller
from sameseed.models.loader import resolve_model
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme
from sameseed.study.measure import Bench, Run, fitted, run_batch
from sameseed.study.passes import Pass, TimedModel
from sameseed.study.prompt_sets import Prompt
from sameseed.study.quality.bootstrap import Interval, ratio_interval
from sameseed.study.quality.variant import Variant, stored
from sameseed.study.workload import PLAIN, Arm

CHAIN = 8  # rows of c(8)
CONTEXT = 256
ROUNDS = 15


@dataclass(frozen=True)
class DraftAcceptance:
    """Of a run with a draft: accepted over drafted tokens, their interval over prompts, and tokens a draft yields."""

    acceptance_rate: float | None
    interval: Interval | None
    mean_acceptance_length: float | None
    num_drafts: int
    accepted_per_pos: tuple[int, ...]

    @classmethod
    def of(cls, run: Run, seed: int) -> DraftAcceptance:
        """From a run's counters."""
        each = [c.metrics.spec for c in run.completions]
        interval = ratio_interval([m.num_accepted_tokens for m in each], [m.num_draft_tokens for m in each], seed)
        m = run.metrics
        counts = tuple(m.num_accepted_tokens_per_pos)
        return cls(m.acceptance_rate, interval, m.mean_acceptance_length, m.num_drafts, counts)


@dataclass
class Speed:
    """One variant's seconds: runs of plain decoding and with the draft, and passes over 1 and CHAIN rows."""

    plain: list[Run]
    drafted: list[Run]
    one: list[float] = field(default_factory=list)
    chain: list[float] = field(default_factory=list)
    weight_bytes: int = 0
    kv_row_bytes: float = 0.0
    stored: dict[str, str] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return median(run.tokens_per_s for run in self.plain)

    @property
    def drafted_tokens_per_s(self) -> float:
        return median(run.tokens_per_s for run in self.drafted)

    @property
    def c(self) -> float:
        """c(CHAIN): time of a pass over CHAIN rows over that of one row, of medians."""
        return median(self.chain) / median(self.one)

    @property
    def same_text(self) -> bool:
        """Did the draft change nothing?"""
        return all(run.texts == self.plain[0].texts for run in (*self.plain, *self.drafted))

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "drafted_tokens_per_s": self.drafted_tokens_per_s,
            f"c{CHAIN}": self.c,
            "pass_1_ms": median(self.one) * 1e3,
            f"pass_{CHAIN}_ms": median(self.chain) * 1e3,
            "repetitions": [
                {"tokens_per_s": a.tokens_per_s, "drafted_tokens_per_s": b.tokens_per_s}
                for a, b in zip(self.plain, self.drafted, strict=True)
            ],
            "equals_plain": self.same_text,
        }


def drafts_for_itself(variant: Variant, spec: SpecConfig) -> bool:
    """Is the draft this very model in as many bits? It would agree with itself and save nothing."""
    if spec.model is None:
        return False
    folder = resolve_model(variant.model)
    if folder.resolve() != resolve_model(spec.model).resolve():
        return False
    return not is_smaller(folder, QuantScheme.parse(spec.format), QuantScheme.parse(variant.format))


def measure(
    variants: Seq[Variant],
    spec: SpecConfig,
    prompts: Seq[Prompt],
    max_tokens: int,
    settings: dict[str, Any],
    repeat: int,
    tick: Callable[[], None],
) -> list[Speed]:
    """Load variants; decode the prompts `repeat` times, plain and drafted, and time passes: all in turn at each batch.

    The draft itself, if it is among them, is drafted for by n-grams. Raises what LLM raises, RequestError for a prompt
    that does not fit.
    """
    ngram = SpecConfig("ngram", num_draft_tokens=spec.num_draft_tokens, policy=spec.policy)
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    subjects = []
    for v in variants:
        arm = Arm("draft", ngram if drafts_for_itself(v, spec) else spec)
        given = fitted(v.model, {**settings, **v.settings, "max_num_seqs": 1}, prompts, max_tokens)
        bench = Bench(v.model, [PLAIN, arm], given)
        subjects.append(
            (
                bench,
                bench.workload("prompts", prompts, params),
                Speed([Run() for _ in range(repeat)], [Run() for _ in range(repeat)]),
            )
        )
    for bench, workload, _ in subjects:
        bench.warm_up(workload)
    for r in range(repeat):
        for i in range(len(prompts)):
            first = (r + i) % len(subjects)
            for bench, workload, speed in subjects[first:] + subjects[:first]:
                job = list(workload.batches())[i]
                for arm, runs in zip(bench.arms, (speed.plain, speed.drafted), strict=True):
                    run_batch(bench.install(arm), job, runs[r])
                tick()
    _passes([(bench, speed) for bench, _, speed in subjects])
    return [speed for _, _, speed in subjects]


def _passes(subjects: Seq[tuple[Bench, Speed]]) -> None:
    """Passes over one row and over CHAIN rows, in turns."""
    built = []
    for bench, speed in subjects:
        model, cache = bench.llm.engine.runner.model, bench.llm.engine.runner.cache
        context = min(CONTEXT, model.max_model_len - CHAIN)
        one, chain = (Pass("chain", context, rows) for rows in (1, CHAIN))
        subject = TimedModel(model, cache.format, [one, chain])
        speed.weight_bytes, speed.kv_row_bytes = subject.weight_bytes, subject.kv_row_bytes
        speed.stored = stored(bench.llm)
        built.append((subject, one, chain, speed))
    gc.collect()
    for done in range(ROUNDS + 1):
        for subject, one, chain, speed in built:
            a, b = subject.seconds(one), subject.seconds(chain)
            if done:  # the first round warms up
                speed.one.append(a)
                speed.chain.append(b)


def as_draft(
    baseline: Variant,
    variant: Variant,
    num_draft_tokens: int,
    prompts: Seq[Prompt],
    max_tokens: int,
    settings: dict[str, Any],
    seed: int,
) -> tuple[DraftAcceptance | None, str | None]:
    """Acceptance of the variant's weights when they draft for the baseline; None, and why, where they cannot.

    None without a reason for the baseline's own weights, which agree by construction. The draft's cache has the
    engine's format, which is the baseline's: what is measured is the weights.
    """
    same = resolve_model(baseline.model).resolve() == resolve_model(variant.model).resolve()
    if same and QuantScheme.parse(baseline.format) == QuantScheme.parse(variant.format):
        return None, None
    spec = SpecConfig("draft_model", variant.model, variant.format, num_draft_tokens)
    try:
        llm = LLM(baseline.model, spec, **{**settings, **baseline.settings, "max_num_seqs": 8, "prefix_cache": False})
        params = SamplingParams(max_tokens=max_tokens, seed=0)
        jobs = [(tuple(p.encode(llm.tokenizer)), params) for p in prompts]
        run = Run()
        run_batch(llm.engine, [(tokens, replace(params, seed=i)) for i, (tokens, _) in enumerate(jobs)], run)
    except (VocabularyError, RequestError, ConfigError) as error:
        return None, str(error)
    return DraftAcceptance.of(run, seed), None
