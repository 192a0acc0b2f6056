"""Compare variants of a model: quality, size, and what a format does to speculation, as target and as draft."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from sameseed.config import SpecConfig, draft_text
from sameseed.engine.build import check_parts
from sameseed.engine.levels import resolve
from sameseed.engine.llm import LLM
from sameseed.engine.memory import demand
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError, RequestError, SameseedError, VocabularyError
from sameseed.measure.bench import Bench, Run, fitted, fitting, interleave, run_batch
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.quality import tasks
from sameseed.measure.quality.perplexity import estimate, mean_interval, ratio, ratio_interval
from sameseed.measure.quality.show import Variant, make_record
from sameseed.measure.quality.tasks import EvalSettings, Quality, Report, counter, silent
from sameseed.measure.workload import DEFAULT_PROMPTS, Arm, Workload, prompts_name, read_prompts, stored
from sameseed.memory import available_memory
from sameseed.models.config import EMBEDDED
from sameseed.models.draft_format import is_smaller
from sameseed.models.loader import resolve_model, target_scheme
from sameseed.report import record
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme

T = TypeVar("T")
NEAR_ZERO = 0.05  # acceptance rate below which speculation only costs time
FAR_BELOW = 0.6  # share of the baseline's acceptance rate, below which a warning is given
LOST = 1.1  # perplexity over the baseline's, above which a warning is given
COMPARE_TOKENS = 32768  # default tokens of the perplexity text, limited because several variants read it
Measured = tuple[dict[str, object], dict[str, Any]]  # formats, figures


@dataclass(frozen=True)
class Comparing:
    """Settings of a comparison."""

    quality: EvalSettings = field(default_factory=lambda: EvalSettings(tokens=COMPARE_TOKENS))
    draft: str | SpecConfig | None = None  # None: the embedded draft if the baseline has its tokenizer, else ngram
    num_draft_tokens: int = 4
    speculation: dict[str, Any] = field(default_factory=dict)  # further arguments of `make_config` for the draft
    prompts: Path = DEFAULT_PROMPTS
    num_prompts: int | None = 12
    max_tokens: int = 64
    repeat: int = 3
    engine: dict[str, Any] = field(default_factory=dict)  # keyword arguments of LLM besides formats and draft


@dataclass(frozen=True)
class Comparison:
    """Records of the variants (`EVAL_SCHEMA`), the baseline first, and by label why others `failed` in measuring."""

    records: list[dict[str, Any]]
    failed: dict[str, str]


def report(
    variants: Seq[str | Variant],
    asked: Comparing | None = None,
    progress: Report = silent,
    tell: Callable[[str], None] = lambda text: None,
    keep: Callable[[Variant, Quality], None] = lambda variant, quality: None,
) -> Comparison:
    """Measure variants, each MODEL[@FORMAT[@KVFORMAT]]. The first is the baseline.

    All are checked before the first is measured: `tell` gets a line for each that cannot run, and for each prompt that
    does not fit. `keep` gets the quality of each variant as soon as it is measured. Raises ConfigError for a bad choice
    before any work, and what the baseline raises.
    """
    parsed = [v if isinstance(v, Variant) else Variant.parse(v) for v in variants]
    asked = asked or Comparing()
    if len(parsed) < 1 or len(set(parsed)) < len(parsed):
        raise ConfigError("give the baseline and other variants, each once, e.g. --compare embedded embedded@w4a8")
    resolve_model((base := parsed[0]).model)
    tasks.check(asked.quality)
    prompts, spec = read_prompts(asked.prompts, asked.num_prompts), draft_spec(base, asked)

    def each(of: Iterable[Variant], run: Callable[[Variant], T], into: dict[Variant, str]) -> dict[Variant, T]:
        """The results of those that can be run; the others are named in `into`. Raises what the baseline raises."""
        found = {}
        for v in of:
            try:
                found[v] = run(v)
            except (SameseedError, MemoryError) as error:
                if v is base:
                    raise
                into[v] = str(error) or type(error).__name__
        return found

    def checked(v: Variant) -> SpecConfig:
        """What drafts for the variant: n-grams where it is the draft itself."""
        ngram = SpecConfig("ngram", num_draft_tokens=spec.num_draft_tokens, policy=spec.policy)
        own = ngram if drafts_for_itself(v, spec) else spec
        check_parts(resolve_model(v.model), make_config(own, **asked.engine, **v.settings))
        return own

    def quality_of(v: Variant) -> Quality:
        gc.collect()  # what was loaded before
        llm = LLM(v.model, **{**asked.engine, **v.settings})
        found = tasks.evaluate(llm, asked.quality, lambda s, d, t: progress(f"{v.label}: {s}", d, t))
        keep(v, found)
        return found

    impossible, failed = dict[Variant, str](), dict[Variant, str]()
    drafts = each(parsed, checked, impossible)
    parsed = list(drafts)
    for v, reason in impossible.items():
        tell(f"left out: {v.label}: {reason}")
    if impossible and len(parsed) == 1:
        raise ConfigError(f"there is nothing to compare: {reason}")
    for v in parsed:
        prompts = fitting(resolve_model(v.model), asked.engine, prompts, lambda text: tell(f"left out: {text}"))
    qualities = each(parsed, quality_of, failed)
    tick = counter(partial(progress, "speed, interleaved"), 2 * asked.repeat * len(prompts) * len(qualities))

    def speeds_of(group: Seq[Variant]) -> dict[Variant, Measured]:
        gc.collect()  # what was loaded before
        benches = {v: _load(v, drafts[v], prompts, asked) for v in group}
        runs = interleave(list(benches.values()), asked.repeat, lambda label: tick())
        return {v: _figures(b, runs, asked.quality.seed) for v, (b, _) in benches.items()}

    speeds = dict[Variant, Measured]()
    if _fit_together(qualities, asked):
        with suppress(SameseedError, MemoryError):
            speeds = speeds_of(list(qualities))
    together = bool(speeds)
    if not together:  # each by itself, also to find out which of them cannot run
        speeds = each(qualities, lambda v: speeds_of([v])[v], failed)
    gc.collect()
    run_id, name = record.now(), draft_text(spec) if spec.model is None else Path(spec.model).name
    shared = {
        "draft": f"{name}, {spec.num_draft_tokens} tokens",
        "speculation": dict(asked.speculation),
        "prompts": prompts_name(asked.prompts),
        "num_prompts": len(prompts),
        "max_tokens_of_speed": asked.max_tokens,
    }
    records = list[dict[str, Any]]()
    # As a draft, it should reach the rate of the first variant of its model; for the baseline's model, rate 1.
    rates: dict[str, float | None] = {base.model: 1.0}
    for i, (v, (config, figures)) in enumerate(speeds.items()):
        progress("as draft of the baseline", i, len(parsed))
        drafted, why = as_draft(base, v, prompts, asked)
        notes = [] if why is None else [f"cannot draft for the baseline: {why}"]
        if drafts[v] is not spec:
            notes.append("it is the draft itself, so n-grams draft for it")
        comparison = {
            "baseline": base.label,
            "interleaved": together or len(qualities) == 1,
            "disk_bytes": v.disk_bytes(),
            **figures,
            "as_draft": drafted,
            "notes": notes,
            **_beside(qualities[v], qualities[base], notes, asked.quality.seed),
        }
        records.append(make_record(v, asked.quality, qualities[v], {**config, **shared}, comparison))
        records[-1]["run"] = run_id
        comparison["warnings"] = warnings(records[-1], records[0], rates.get(v.model))
        rates.setdefault(v.model, None if drafted is None else drafted["acceptance_rate"])
    return Comparison(records, {v.label: reason for v, reason in failed.items()})


def draft_spec(baseline: Variant, asked: Comparing) -> SpecConfig:
    """The speculation settings for every variant as target. Raises ConfigError."""
    draft = asked.draft
    if draft is None:
        ours = (resolve_model("embedded") / "tokenizer.json").read_bytes()
        tokenizer = resolve_model(baseline.model) / "tokenizer.json"
        same = baseline.model in EMBEDDED or (tokenizer.is_file() and tokenizer.read_bytes() == ours)
        draft = "embedded-draft" if same else "ngram"
    given = {"policy": "fixed", "num_draft_tokens": asked.num_draft_tokens, **asked.speculation}
    spec = make_config(draft, **given).spec
    resolve(spec)  # bad options fail here, before any work
    if spec.method == "none" or spec.num_draft_tokens < 1:
        raise ConfigError("a comparison measures acceptance: give a draft (--draft) of at least one token")
    return spec


def drafts_for_itself(variant: Variant, spec: SpecConfig) -> bool:
    """Whether the draft is the variant's own model in no fewer bits. Such a draft always agrees, and saves nothing."""
    if spec.model is None:
        return False
    folder = resolve_model(variant.model)
    if folder.resolve() != resolve_model(spec.model).resolve():
        return False
    return not is_smaller(folder, QuantScheme.parse(spec.format), QuantScheme.parse(variant.format))


def _fit_together(variants: Iterable[Variant], asked: Comparing) -> bool:
    """Whether all variants fit in half of the free memory."""
    engine = {k: v for k, v in asked.engine.items() if k not in ("block_size", "num_blocks")}
    whole = 0
    for v in variants:
        folder, config = resolve_model(v.model), make_config(None, **engine, **v.settings)
        # Twice: a second copy exists while the drafter is loaded.
        whole += 2 * demand(folder, target_scheme(v.format, folder), config).weights
    return whole <= available_memory() // 2


def _load(v: Variant, spec: SpecConfig, prompts: Seq[Prompt], asked: Comparing) -> tuple[Bench, Workload]:
    """A variant's plain and drafted arms, warm."""
    arms = [Arm("plain", SpecConfig()), Arm("draft", spec)]
    given = fitted(v.model, {**asked.engine, **v.settings, "max_num_seqs": 1}, prompts, asked.max_tokens)
    bench = Bench(v.model, arms, given)
    workload = bench.workload("prompts", prompts, SamplingParams(max_tokens=asked.max_tokens, seed=0))
    bench.warm_up(workload)
    return bench, workload


def _figures(bench: Bench, runs: Mapping[Arm, Seq[Run]], seed: int) -> Measured:
    """Formats, size, speed and acceptance of a variant with its plain and drafted runs."""
    runner, cache = bench.llm.engine.runner, bench.llm.engine.runner.cache
    plain, drafted = (runs[arm] for arm in bench.arms)
    pairs = [(a.tokens_per_s, b.tokens_per_s) for a, b in zip(plain, drafted, strict=True)]
    figures = {
        "weight_bytes": sum(m.nbytes for m in runner.model.weights.matrices),
        "kv_bytes_per_token": cache.nbytes / (cache.num_blocks * cache.block_size),
        "as_target": _acceptance(drafted[0], seed),
        "tokens_per_s": median(a for a, _ in pairs),
        "drafted_tokens_per_s": median(b for _, b in pairs),
        "repetitions": [{"tokens_per_s": a, "drafted_tokens_per_s": b} for a, b in pairs],
        "equals_plain": all(run.texts == plain[0].texts for run in (*plain, *drafted)),
    }
    return stored(runner.model, bench.llm.config.format, cache.format), figures


def _acceptance(run: Run, seed: int) -> dict[str, Any]:
    """Acceptance in a run with a draft: acceptance rate with an interval over prompts, and tokens per draft."""
    each, m = [c.metrics.spec for c in run.completions], run.metrics
    interval = ratio_interval([m.num_accepted_tokens for m in each], [m.num_draft_tokens for m in each], seed)
    names = ("acceptance_rate", "mean_acceptance_length", "num_drafts")
    counts = {"interval": interval, "accepted_per_pos": tuple(m.num_accepted_tokens_per_pos)}
    return {name: getattr(m, name) for name in names} | counts


def as_draft(
    baseline: Variant, variant: Variant, prompts: Seq[Prompt], asked: Comparing
) -> tuple[dict[str, Any] | None, str | None]:
    """Acceptance with the variant as draft model for the baseline; (None, reason) if that is impossible.

    (None, None) for the baseline's own weights, which agree by construction. The draft's KV cache has the baseline's
    format, so only the effect of the weights is measured.
    """
    same = resolve_model(baseline.model).resolve() == resolve_model(variant.model).resolve()
    if same and QuantScheme.parse(baseline.format) == QuantScheme.parse(variant.format):
        return None, None
    spec = SpecConfig("draft_model", variant.model, variant.format, asked.num_draft_tokens)
    params = SamplingParams(max_tokens=asked.max_tokens)
    settings = {**asked.engine, **baseline.settings, "max_num_seqs": 8, "prefix_cache": False}
    try:
        llm = LLM(baseline.model, spec, **settings)
        jobs = [(tuple(p.encode(llm.tokenizer)), replace(params, seed=i)) for i, p in enumerate(prompts)]
        run = run_batch(llm.engine, jobs)
    except (VocabularyError, RequestError, ConfigError) as error:
        why = str(error)
        for model in (baseline.model, variant.model):  # their paths may be private
            why = why.replace(model, record.model_name(model))
        return None, why
    return _acceptance(run, asked.quality.seed), None


def _beside(mine: Quality, base: Quality, notes: list[str], seed: int) -> dict[str, Any]:
    """The ratio of perplexities and the differences of scores to the baseline's, or in `notes` why there is none."""
    times, differences = None, dict[str, Any]()
    a, b = mine.perplexity, base.perplexity
    if mine is not base and a is not None and b is not None:
        if a.digest != b.digest:
            notes.append("another tokenizer than the baseline's: compare bits per byte, not perplexity")
        elif (a.window, a.stride) != (b.window, b.stride):
            said = f"a window of {a.window} tokens by {a.stride}, the baseline's of {b.window} by {b.stride}"
            notes.append(f"{said}: for a ratio, give a --window that fits the context of both")
        else:
            times = estimate(*ratio(a, b, seed))
    for own, its in zip(mine.results, base.results, strict=True) if mine is not base else ():
        paired = mean_interval([x - y for x, y in zip(own.scores, its.scores, strict=True)], seed)
        differences[own.task] = estimate(own.value - its.value, paired)
    return {"perplexity_ratio": times, "differences": differences}


def warnings(made: Mapping[str, Any], base: Mapping[str, Any], own_rate: float | None) -> list[str]:
    """Warnings about a variant. `own_rate`: acceptance of its model as a draft in its original format, if known."""
    c, found = made["comparison"], []
    pairs = {"as target": (c["as_target"], base["comparison"]["as_target"]["acceptance_rate"])}
    pairs["as draft"] = c["as_draft"], own_rate
    for role, (mine, its) in pairs.items():
        if mine is None:
            continue
        rate = mine["acceptance_rate"]
        if rate is None:
            if its:
                found.append(f"{role}, nothing was drafted at all: speculation is switched off in effect")
        elif rate < NEAR_ZERO:
            found.append(
                f"{role}, acceptance is {rate:.1%}: near zero, so speculation only costs time. The format "
                "broke the agreement of draft and target; keep more bits, or switch speculation off"
            )
        elif made is not base and its and rate < FAR_BELOW * its:
            found.append(
                f"{role}, acceptance fell to {rate:.1%} from the original's {its:.1%}: speculation loses "
                "most of what it bought; keep more bits, or draft with fewer tokens"
            )
    times = c["perplexity_ratio"] and c["perplexity_ratio"]["value"]
    if made["perplexity"] is not None and made["perplexity"]["value"] is None:
        found.append("perplexity is not finite: the format overflows, or the checkpoint is broken")
    elif times is not None and times > LOST:
        found.append(f"perplexity is {times:.2f} times the baseline's: too few bits, or a badly chosen scale")
    if not c["equals_plain"]:
        found.append("speculation changed the text: this must not happen, report it as a defect of sameseed")
    return found
