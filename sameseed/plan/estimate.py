"""Estimate: memory and speed of a model, plain and with drafts, before any weight is loaded.

Every figure has an 80 % interval and a grade: "paper" (config.json and the machine's limits), "profiled" (measured
costs) or "anchored" (a few real rounds). Acceptance chances come from a file or are assumed, which the output then
says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from sameseed import registry
from sameseed.config import SpecConfig, parse_draft
from sameseed.cost.engines import UNSTATED, EngineCosts
from sameseed.cost.round import CostSpread, ModelSteps, RoundCost, lengths_by_batch
from sameseed.devices import available_memory
from sameseed.engine.build import SELF_FORMAT
from sameseed.engine.levels import Level
from sameseed.errors import ConfigError, VocabularyError
from sameseed.measure.costs import Profile
from sameseed.measure.limits import Limits, from_rates
from sameseed.measure.shapes import SHAPES, shape_as_dict
from sameseed.models.config import is_parallel
from sameseed.models.head_config import is_block, is_head
from sameseed.plan.anchor import anchor
from sameseed.plan.memory import Memory, memory, too_small
from sameseed.plan.outlook import (
    ASSUMED,
    ASSUMED_FOUND,
    LENGTHS,
    SEARCH,
    AcceptChances,
    DraftPlan,
    DraftSpeed,
    prompt_figure,
    read_acceptance,
    speeds,
)
from sameseed.plan.paper import GAP, GAP_SPREAD, Sheet, find, head_sheet, sheet
from sameseed.tuned import TunedFigure

FORMATS = ("auto", "w8a8", "w4a8")  # estimated where no format is asked for
TABLE = 64  # number of sequences up to which the best lengths are listed
PADDED = 1.05  # ratio of vocabulary sizes up to which the difference is padding
CONTEXT, PROMPT = 1024, 512  # tokens of a text and of its prompt, where none are given; less in a shorter context


@dataclass(frozen=True)
class Question:
    """What to estimate. `formats` empty: the usual ones; `available`: bytes of memory, None for this machine's.

    `acceptance`: for each draft what `read_acceptance` takes; a single entry serves all. `run`: load the model and
    measure it, with `threads` threads.
    """

    model: str
    formats: tuple[str, ...] = ()
    kv_format: str = "auto"
    drafts: tuple[str, ...] = ()
    draft_format: str = "auto"
    acceptance: tuple[str, ...] = ()
    context: int | None = None
    prompt_tokens: int | None = None
    batches: tuple[int, ...] = (1, 8)
    available: int | None = None
    run: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1 or max(self.batches) > 4096:
            raise ConfigError(f"batch sizes must lie in 1..4096, got {', '.join(map(str, self.batches)) or 'none'}")
        if any(n is not None and n < 1 for n in (self.context, self.prompt_tokens)):
            raise ConfigError("a context and a prompt have at least 1 token")
        if "none" in self.drafts:
            raise ConfigError("decoding without a draft is always among the figures: leave out --draft none")
        if len(self.acceptance) not in (0, 1, len(self.drafts)) or (self.acceptance and not self.drafts):
            raise ConfigError(
                f"{len(self.acceptance)} acceptances for {len(self.drafts)} drafts: give --acceptance once for all, or "
                "once for each --draft, in the same order"
            )

        for draft in self.drafts:
            Level.of(parse_draft(draft))

    def chances(self) -> list[AcceptChances]:
        """Acceptance chances of each draft. Raises ConfigError for files that hold none."""
        given = self.acceptance or (None,)
        usual = [ASSUMED if _owning(parse_draft(d)) else ASSUMED_FOUND for d in self.drafts]
        return [read_acceptance(given[i % len(given)], usual[i]) for i in range(len(self.drafts))]


@dataclass(frozen=True)
class Estimate:
    """The estimate for one format of a model. `by_batch`: for each draft, the best lengths as (first, last, length).

    `acceptance`: for each draft, the source of its chances. `memory` is None for another engine. `loss`: the likely
    loss of quality in words; "" for the checkpoint's own bits.
    """

    model: str
    format: str
    kv_format: str
    context: int
    prompt_tokens: int
    memory: Memory | None
    ttft_s: TunedFigure | None
    speeds: tuple[DraftSpeed, ...]
    by_batch: Mapping[str, tuple[tuple[int, int, int], ...]]
    acceptance: Mapping[str, str]
    loss: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the tables by batch under vLLM's name."""
        found = asdict(self)
        found["num_speculative_tokens_per_batch_size"] = found.pop("by_batch")
        return found


def estimate(asked: Question, machine: Limits | Profile) -> list[Estimate]:
    """One estimate for each format. `machine`: its limits, or what was profiled of this model there.

    Raises ConfigError, ModelLoadError or RegistryError; also where not even one sequence fits in memory in any format.
    """
    profile = machine if isinstance(machine, Profile) else None
    limits = machine.limits if isinstance(machine, Profile) else machine
    batches, chances = tuple(sorted(set(asked.batches))), asked.chances()
    found, misfits, given = [], [], asked
    for target in _sheets(asked, profile):
        most = target.config.max_model_len
        context = min(CONTEXT, most) if asked.context is None else asked.context
        asked = replace(asked, prompt_tokens=given.prompt_tokens or min(PROMPT, most))
        if max(context, asked.prompt_tokens or 0) > most:
            raise ConfigError(
                f"{asked.model} has a context of {most} tokens: lower --context and --prompt-tokens to it"
            )
        drafts = [_plan(d, c, asked, target, limits, profile) for d, c in zip(asked.drafts, chances, strict=True)]
        available = available_memory() if asked.available is None else asked.available
        needs = memory(target, drafts, available, context, batches)
        if needs.max_batch < 1:
            misfits.append(too_small(needs, target, asked.model, asked.kv_format, context))
            continue
        cost = target.cost(limits) if profile is None else _profiled(profile, target)
        if asked.run:
            settings = {"format": target.name, "kv_format": asked.kv_format, "threads": asked.threads}
            real = anchor(
                asked.model, drafts, asked.draft_format, asked.prompt_tokens or PROMPT, cost, most, **settings
            )
            cost, drafts = real.cost, list(real.drafts)
        figures = _figures(asked, target.name, target.kv_format, context, batches, needs, cost, drafts)
        found.append(replace(figures, loss=target.loss))
    if not found:
        raise misfits[-1]
    return found


def estimate_engine(asked: Question, costs: EngineCosts) -> Estimate:
    """Estimate for another engine, from its costs alone: no memory, and no model is read."""
    if asked.formats and asked.formats != (costs.format,):
        raise ConfigError(f"the costs are of format {costs.format or 'unknown'}: leave out --format")
    plans = []
    for text, chance in zip(asked.drafts, asked.chances(), strict=True):
        own = _owning(parse_draft(text)) if text != costs.draft else []  # its time is within the passes
        if own and not costs.draft_ms:
            raise ConfigError(f"the costs have no draft_ms, which --draft {text!r} needs; measure a step of it")
        steps = ModelSteps(costs.steps()) if own else ModelSteps(each=SEARCH)
        plans.append(DraftPlan(text, steps, chance, grade="profiled" if own else None, spread=CostSpread(UNSTATED)))
    batches = tuple(sorted(set(asked.batches)))
    if batches[-1] > costs.batches[-1]:
        raise ConfigError(f"the costs end at {costs.batches[-1]} sequences: lower --batch to it, or measure more")
    most = costs.batches[-1]
    return _figures(
        asked, costs.format, "", costs.context, batches, None, costs.cost(), plans, most, bool(costs.prompts)
    )


def _figures(
    asked: Question,
    format: str,
    kv_format: str,
    context: int,
    batches: tuple[int, ...],
    needs: Memory | None,
    cost: RoundCost,
    drafts: Seq[DraftPlan],
    most: int | None = None,
    reads: bool = True,
) -> Estimate:
    """The figures; `most`: sequences up to which the costs are known; `reads`: are those of prompts known?"""
    prompt, most = asked.prompt_tokens or PROMPT, most or max(TABLE, batches[-1])
    return Estimate(
        asked.model,
        format,
        kv_format,
        context,
        prompt,
        needs,
        prompt_figure(cost, prompt) if reads else None,
        speeds(cost, drafts, batches, context),
        {
            d.text: lengths_by_batch(replace(cost, levels=(d.steps,)), d.acceptance.at(0.5), LENGTHS, most, context)
            for d in drafts
        },
        {d.text: d.acceptance.source for d in drafts},
    )


def _profiled(profile: Profile, target: Sheet) -> RoundCost:
    """The costs that were profiled of this shape. Raises ConfigError where that shape, format or cache was not."""
    known, own = profile.shape, shape_as_dict("", target.config)
    other = [n for n in own if n not in ("name", "max_model_len", "architecture") and known.get(n) != own[n]]
    if other:
        raise ConfigError(
            f"the costs are of {known.get('name')}, whose {other[0]} is {known.get(other[0])} and not "
            f"{own[other[0]]}: profile this model (sameseed profile --model ... --json FILE)"
        )
    cost = profile.cost(target.name, GAP)
    kv_format = next(x.kv_format for x in profile.costs if x.format == target.name)
    if kv_format != target.kv_format:
        raise ConfigError(
            f"{target.name} was profiled with a cache in {kv_format}, not {target.kv_format}: give --kv-format"
        )
    return replace(cost, spread=replace(cost.spread, gap=GAP_SPREAD))


def given_limits(read_gb: float | None, tera_ops: float | None, threads: int) -> Limits | None:
    """Limits of another machine from its data sheet; None where neither figure is given. Raises ConfigError."""
    if read_gb is None and tera_ops is None:
        return None
    if read_gb is None or tera_ops is None or not (0 < read_gb < math.inf and 0 < tera_ops < math.inf):
        raise ConfigError("--machine-read (GB/s) and --machine-ops (1e12 a second) go together, both above 0")
    rates = {"read": (read_gb * 1e9,), **dict.fromkeys(("int8", "fp32", "bf16"), (tera_ops * 1e12,))}
    return from_rates(threads, rates, {}, "given")


def read_bytes(text: str) -> int:
    """Bytes from text like 24GB, 512MiB, 1.5G. Raises ConfigError."""
    units = {"": 1, "b": 1}
    units |= {f"{u}{b}": 1000 ** (i + 1) for i, u in enumerate("kmgt") for b in ("", "b")}
    units |= {f"{u}ib": 1024 ** (i + 1) for i, u in enumerate("kmgt")}
    number = text.strip().rstrip("bBiIkKmMgGtT ")
    unit = text.strip()[len(number) :].strip().lower()
    with suppress(ValueError, KeyError, OverflowError):
        if (size := int(float(number) * units[unit])) > 0:
            return size
    raise ConfigError(f"--memory takes a size like 24GB or 512MiB, got {text!r}")


def _sheets(asked: Question, profile: Profile | None) -> list[Sheet]:
    """Sheets of the model in each format; of the usual formats only those that it can be stored in, each once."""
    named = asked.formats or (() if profile is None else profile.formats)
    found = [sheet(asked.model, f, asked.kv_format) for f in named or FORMATS[:1]]
    if profile is not None:
        return [replace(s, name=f) for s, f in zip(found, named, strict=True)]
    for name in () if named else FORMATS[1:]:
        with suppress(ConfigError):
            found.append(sheet(asked.model, name, asked.kv_format))
    return list({s.name: s for s in found}.values())


def _owning(spec: SpecConfig) -> list[SpecConfig]:
    """Draft levels that own a model or a head, or store the target a second time. Raises ConfigError."""
    owns = "" if spec.method == "none" else registry.load("drafters", spec.method).DRAFTER.owns
    if owns and owns != "target" and spec.model is None:
        raise ConfigError(f"--draft {spec.method} needs a model: write {spec.method}:MODEL")
    below = [level for b in spec.below for level in _owning(b)]
    return [*below, spec] if owns else below


def _plan(
    text: str, chance: AcceptChances, asked: Question, target: Sheet, limits: Limits, profile: Profile | None
) -> DraftPlan:
    """A draft on paper, or as profiled with the target; of several draft models, the slowest gives the step time."""
    costs: list[RoundCost] = []
    sheets = []
    at_once = False
    for spec in _owning(parse_draft(text)):
        if spec.model is None:  # the target in fewer bits
            form = SELF_FORMAT if asked.draft_format == "auto" else asked.draft_format
            sheets.append(sheet(asked.model, form, asked.kv_format))
            costs.append(_draft_cost(sheets[-1], limits, profile))
            continue
        path = None if spec.model.lower() in SHAPES else find(spec.model)
        if path is not None and path.is_dir() and is_head(path):
            own = head_sheet(path, asked.draft_format, asked.kv_format, target)
            at_once = is_block(path)
        else:
            own = sheet(spec.model, asked.draft_format, asked.kv_format, target)
            at_once = registry.load("drafters", spec.method).DRAFTER.at_once or (path is not None and is_parallel(path))
            sizes = sorted((own.config.vocab_size, target.config.vocab_size))
            if own.config.num_layers > 1 and path is not None and sizes[1] > PADDED * sizes[0]:
                raise VocabularyError(
                    f"{spec.model} has {own.config.vocab_size} tokens, {asked.model} "
                    f"{target.config.vocab_size}: take a draft of the target's family"
                )
        sheets.append(own)
        costs.append(_draft_cost(own, limits, profile))
    slowest = max(costs, key=lambda cost: cost.target(1, 1, CONTEXT), default=None)
    weights, row = sum(s.weights for s in sheets), sum(s.row for s in sheets)
    if slowest is None:
        return DraftPlan(text, ModelSteps(each=SEARCH), chance, weights, row)
    return DraftPlan(text, ModelSteps(slowest.passes, at_once), chance, weights, row, slowest.grade, slowest.spread)


def _draft_cost(own: Sheet, limits: Limits, profile: Profile | None) -> RoundCost:
    """Profiled costs where the profile's draft has this shape, weight format and cache format, else those on paper."""
    if profile is not None and profile.draft is not None and own.name in profile.draft.formats:
        with suppress(ConfigError):
            return _profiled(profile.draft, own)
    return own.cost(limits)
