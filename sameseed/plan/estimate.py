"""Estimate: memory and speed of a model before it is loaded; each figure with an 80 % interval and a grade."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sameseed import registry
from sameseed.config import SpecConfig, parse_draft
from sameseed.cost.experts import in_texts, in_words
from sameseed.cost.round import MAX_NUM_ROWS, ModelSteps, RoundCost, lengths_by_batch
from sameseed.engine.build import SELF_FORMAT
from sameseed.engine.levels import Level
from sameseed.engine.memory import pass_bytes
from sameseed.errors import ConfigError, ModelLoadError, VocabularyError
from sameseed.fields import check_ranges, flag, within
from sameseed.measure.costs import Profile, ShapeCosts
from sameseed.measure.limits import Limits
from sameseed.measure.shapes import SHAPES, shape_as_dict
from sameseed.memory import available_memory
from sameseed.models.config import is_parallel
from sameseed.models.head_config import is_block, is_head
from sameseed.models.loader import check_vocab
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
from sameseed.plan.paper import GAP, Sheet, find, head_sheet, sheet
from sameseed.tuned import TunedFigure

FORMATS = ("auto", "w8a8", "w4a8")  # estimated where no format is asked for
TABLE = 64  # number of sequences up to which the best lengths are listed
PADDED = 1.05  # ratio of vocabulary sizes up to which the difference is padding
CONTEXT, PROMPT = 1024, 512  # tokens of a text and of its prompt, where none are given; less in a shorter context


@dataclass(frozen=True)
class Question:
    """What to estimate."""

    model: str
    formats: tuple[str, ...] = ()  # empty: the usual ones
    kv_format: str = "auto"
    drafts: tuple[str, ...] = ()
    draft_format: str = "auto"
    acceptance: tuple[str, ...] = ()  # for each draft what `read_acceptance` takes; a single entry serves all
    context: int | None = within(None, 1)
    prompt_tokens: int | None = within(None, 1)
    batches: tuple[int, ...] = within((1, 8), 1, 4096)
    available: int | None = None  # bytes of memory; None: this machine's

    def __post_init__(self) -> None:
        check_ranges(self, lambda name: "--batch" if name == "batches" else flag(name))
        if "none" in self.drafts:
            raise ConfigError("decoding without a draft is always among the figures: leave out --draft none")
        if len(self.acceptance) not in (0, 1, len(self.drafts)) or (self.acceptance and not self.drafts):
            raise ConfigError(
                f"{len(self.acceptance)} acceptances for {len(self.drafts)} drafts: give --acceptance once for all, or "
                "once for each --draft, in the same order"
            )
        for draft in self.drafts:
            Level.of(parse_draft(draft))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes in ascending order."""
        return tuple(sorted(set(self.batches)))

    @property
    def chances(self) -> list[AcceptChances]:
        """Acceptance chances of each draft. Raises ConfigError for files that hold none."""
        given = self.acceptance or (None,)
        usual = [ASSUMED if _owning(parse_draft(d)) else ASSUMED_FOUND for d in self.drafts]
        return [read_acceptance(given[i % len(given)], usual[i]) for i in range(len(self.drafts))]


@dataclass(frozen=True)
class Estimate:
    """The estimate for one format of a model. `num_speculative_tokens_per_batch_size`: vLLM's name for best lengths."""

    model: str
    context: int
    prompt_tokens: int
    speeds: tuple[DraftSpeed, ...]
    num_speculative_tokens_per_batch_size: Mapping[str, tuple[tuple[int, int, int], ...]]
    acceptance: Mapping[str, str]  # for each draft, the source of its chances
    format: str
    kv_format: str
    memory: Memory
    ttft_s: TunedFigure
    loss: str  # the likely loss of quality in words; "" for the checkpoint's own bits
    experts: str  # how many rows choose, and the source of that; "" for a model without them


def estimate(asked: Question, machine: Limits | Profile) -> list[Estimate]:
    """One estimate a format; `machine`: limits, or a profile. Raises ConfigError, ModelLoadError, RegistryError."""
    profile, limits = (machine, machine.limits) if isinstance(machine, Profile) else (None, machine)
    available = available_memory() if asked.available is None else asked.available
    found, misfits = [], []
    for target in _sheets(asked, profile):
        most = target.config.max_model_len
        context, prompt = asked.context or min(CONTEXT, most), asked.prompt_tokens or min(PROMPT, most)
        if max(context, prompt) > most:
            raise ConfigError(
                f"{asked.model} has a context of {most} tokens: lower --context and --prompt-tokens to it"
            )
        drafts = [_plan(d, c, asked, target, limits, profile) for d, c in zip(asked.drafts, asked.chances, strict=True)]
        needs = memory(target, drafts, available, context, asked.sizes, asked.available is None)
        if needs.max_batch < 1:
            misfits.append(too_small(needs, target, asked.model, asked.kv_format, context))
            continue
        cost = target.cost(limits) if profile is None else _profiled(profile, target)
        most = max(TABLE, asked.sizes[-1])
        lengths = {
            d.text: lengths_by_batch(replace(cost, levels=(d.steps,)), d.acceptance.at(0.5), LENGTHS, most, context)
            for d in drafts
        }
        found.append(
            Estimate(
                asked.model,
                context,
                prompt,
                speeds(cost, drafts, asked.sizes, context),
                lengths,
                {d.text: d.acceptance.source for d in drafts},
                target.name,
                target.kv_format,
                needs,
                prompt_figure(cost, prompt),
                target.loss,
                in_words(target.config),
            )
        )
    if not found:
        raise misfits[-1]
    return found


def _profiled(profile: ShapeCosts, target: Sheet) -> RoundCost:
    """The costs that were profiled of this shape. Raises ConfigError where that shape, format or cache was not."""
    known, own = profile.shape, shape_as_dict("", target.config)
    counts = own.keys() - {"name", "max_model_len", "architecture", "distinct_experts"}
    if other := [fact for fact in own if fact in counts and known.get(fact) != own[fact]]:
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
    return replace(cost, passes=in_texts(cost.passes, target.config))


def given_limits(read_gb: float | None, tera_ops: float | None, threads: int) -> Limits | None:
    """Limits of another machine from its data sheet; None where neither figure is given. Raises ConfigError."""
    if read_gb is None and tera_ops is None:
        return None
    if read_gb is None or tera_ops is None or not (0 < read_gb < math.inf and 0 < tera_ops < math.inf):
        raise ConfigError("--machine-read (GB/s) and --machine-ops (1e12 a second) go together, both above 0")
    rates = {"read": (read_gb * 1e9,), **dict.fromkeys(("int8", "fp32", "bf16"), (tera_ops * 1e12,))}
    return Limits(threads, rates, {}, "given")


def read_bytes(text: str) -> int:
    """Bytes from text like 24GB, 512MiB, 1.5G. Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d{1,12}\.?\d*|\.\d+)\s*(?=[a-z])([kmgt]?)(i?)b?\s*", text.lower())
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")) if found else 0
    if size < 1:
        raise ConfigError(f"--memory takes a size like 24GB or 512MiB, got {text!r}")
    return size


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
    if spec.method == "none":
        return []
    cls = registry.load("drafters", spec.method).DRAFTER
    if cls.inside:
        raise ConfigError(f"--draft {spec.method} cannot be estimated, as it lies in the weights; bench measures it")
    if cls.owns and cls.owns != "target" and spec.model is None:
        raise ConfigError(f"--draft {spec.method} needs a model: write {spec.method}:MODEL")
    return [*(level for b in spec.below for level in _owning(b)), *([spec] if cls.owns else [])]


def _plan(
    text: str, chance: AcceptChances, asked: Question, target: Sheet, limits: Limits, profile: Profile | None
) -> DraftPlan:
    """A draft on paper, or as profiled with the target; of several draft models, the slowest gives the step time."""
    parts: list[tuple[Sheet, RoundCost]] = []
    at_once = False
    for spec in _owning(parse_draft(text)):
        path = None if spec.model is None or spec.model.lower() in SHAPES else find(spec.model)
        if spec.model is None:  # the target in fewer bits
            form = SELF_FORMAT if asked.draft_format == "auto" else asked.draft_format
            own = sheet(asked.model, form, asked.kv_format)
        elif path is not None and path.is_dir() and is_head(path):
            own = head_sheet(path, asked.draft_format, asked.kv_format, target)
            at_once = is_block(path)
        else:
            own = sheet(spec.model, asked.draft_format, asked.kv_format, target)
            at_once = registry.load("drafters", spec.method).DRAFTER.at_once or (path is not None and is_parallel(path))
            if path is not None and own.config.num_layers > 1:
                _check_vocabulary(asked.model, target, path, own)
        parts.append((own, _draft_cost(own, limits, profile)))
    if not parts:
        return DraftPlan(text, ModelSteps(each=SEARCH), chance)
    slowest = max((cost for _, cost in parts), key=lambda cost: cost.target(1, 1, CONTEXT))
    sizes = [(own.weights, own.row, pass_bytes(own.config, MAX_NUM_ROWS, 1)) for own, _ in parts]
    weights, row, passing = (sum(each) for each in zip(*sizes, strict=True))
    steps = ModelSteps(slowest.passes, at_once)
    return DraftPlan(text, steps, chance, weights, row, passing, slowest.grade, slowest.spread)


def _check_vocabulary(model: str, target: Sheet, path: Path, draft: Sheet) -> None:
    """Raise VocabularyError for a draft of other tokens: by both tokenizers where they are here, else by number."""
    if model.lower() not in SHAPES:
        with suppress(ModelLoadError):
            return check_vocab(find(model), path)
    sizes = sorted((draft.config.vocab_size, target.config.vocab_size))
    if sizes[1] > PADDED * sizes[0]:
        its, own = draft.config.vocab_size, target.config.vocab_size
        raise VocabularyError(f"{path.name} has {its} tokens, {model} {own}: take a draft of the target's family")


def _draft_cost(own: Sheet, limits: Limits, profile: Profile | None) -> RoundCost:
    """Profiled costs where the profile's draft has this shape, weight format and cache format, else those on paper."""
    if profile is not None and profile.draft is not None and own.name in profile.draft.formats:
        with suppress(ConfigError):
            return _profiled(profile.draft, own)
    return own.cost(limits)
