"""Speed and acceptance of variants: all are loaded and interleaved batch by batch, so that drift affects all alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from sameseed.config import SpecConfig
from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, RequestError, VocabularyError
from sameseed.measure.bench import Bench, Run, fitted, run_batch
from sameseed.measure.passes import Pass, TimedModel
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.quality.bootstrap import Interval, ratio_interval
from sameseed.measure.quality.variant import Variant, stored
from sameseed.measure.workload import PLAIN, Arm
from sameseed.models.draft_format import is_smaller
from sameseed.models.loader import resolve_model
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme

CHAIN = 8  # rows of the pass in c(CHAIN)
CONTEXT = 256
ROUNDS = 15


@dataclass(frozen=True)
class DraftAcceptance:
    """Acceptance in a run with a draft: acceptance rate with an interval over prompts, and tokens per draft."""

    acceptance_rate: float | None
    interval: Interval | None
    mean_acceptance_length: float | None
    num_drafts: int
    accepted_per_pos: tuple[int, ...]

    @classmethod
    def of(cls, run: Run, seed: int) -> DraftAcceptance:
        """Compute it from a run's counters. `seed`: of the bootstrap."""
        each = [c.metrics.spec for c in run.completions]
        interval = ratio_interval([m.num_accepted_tokens for m in each], [m.num_draft_tokens for m in each], seed)
        m = run.metrics
        counts = tuple(m.num_accepted_tokens_per_pos)
        return cls(m.acceptance_rate, interval, m.mean_acceptance_length, m.num_drafts, counts)


@dataclass
class Speed:
    """Timings of one variant: runs of plain decoding (`plain`) and with the draft (`drafted`), and seconds of passes.

    `one`, `chain`: seconds of passes over 1 row and over CHAIN rows. `kv_row_bytes`: bytes of one cached token.
    """

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
        """c(CHAIN): median time of a pass over CHAIN rows, divided by the median time over one row."""
        return median(self.chain) / median(self.one)

    @property
    def same_text(self) -> bool:
        """Whether all runs generated the same texts, with and without the draft."""
        return all(run.texts == self.plain[0].texts for run in (*self.plain, *self.drafted))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a record."""
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
    """Whether the draft is the variant's own model in no fewer bits. Such a draft always agrees, and saves nothing."""
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
    """Load variants, decode the prompts `repeat` times with and without the draft, and time passes, all interleaved.

    A variant that is the draft itself uses the ngram drafter instead. `tick` is called after each prompt of a variant.
    Raises what LLM raises, RequestError for a prompt that does not fit.
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
    """Time passes over one row and over CHAIN rows, interleaved over all variants."""
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
    """Acceptance with the variant as draft model for the baseline; (None, reason) if that is impossible.

    (None, None) for the baseline's own weights, which agree by construction. The draft's KV cache has the baseline's
    format, so only the effect of the weights is measured.
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
