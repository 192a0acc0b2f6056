"""The grid of a tuning: the request, the settings to try, and bounds on latency."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from sameseed.config import GOODPUT_DRAFT_TOKENS, SpecConfig, draft_text
from sameseed.engine.levels import Level, drafter_class, resolve
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError
from sameseed.fields import LARGEST, check_ranges, flag, within
from sameseed.measure.prompt_sets import Prompt
from sameseed.request import SamplingParams
from sameseed.tuned import Chosen

OBJECTIVES = ("balanced", "latency", "throughput", "ttft", "memory")
LENGTHS = (1, 2, 3, 4, 6, 8)  # draft tokens of chains
NODES = (4, 8, 16, 32)  # nodes of trees; of chains with leaves at most twice a chain's
LONGEST = LENGTHS[-1]
CHAIN: Mapping[str, object] = {"top_k": 1, "depth": LONGEST}  # options that make a head's trees a chain
LEAVES: Mapping[str, object] = {"siblings": 1}  # options that add leaves to a model's chains


def parse_slo(text: str) -> dict[str, float]:
    """Bounds by name, in seconds, that nine of ten requests keep, from 'ttft<2s,itl<50ms'. Raises ConfigError."""
    found = dict[str, float]()
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"(ttft|itl)\s*<\s*(\d+\.?\d*|\.\d+)\s*(ms|s)", part)
        if match is None or not float(match[2]):
            raise ConfigError(f"--slo {part!r} is no bound; write e.g. 'ttft<2s', 'itl<50ms' or both with a comma")
        found[match[1]] = min(found.get(match[1], LARGEST), float(match[2]) / (1000 if match[3] == "ms" else 1))
    return found


@dataclass(frozen=True)
class TuneRequest:
    """What to tune. Raises ConfigError for a value out of range.

    `objective`: "latency" looks at the smallest of `batches`, "throughput" at the largest, "balanced" at their
    geometric mean, "ttft" at the time to the first token, "memory" at bytes.
    """

    model: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    drafts: tuple[str, ...]  # as --draft takes them
    formats: tuple[str, ...] = ("auto",)
    kv_formats: tuple[str, ...] = ("auto",)
    draft_formats: tuple[str, ...] = ("auto",)  # of each draft that has a model
    draft_vocabularies: tuple[str, ...] = ("all",)  # the same: as --draft-vocabulary, or "all"
    batches: tuple[int, ...] = within((1, 4), 1)
    threads: tuple[int | None, ...] = (None,)  # of the CPU; None: the backend's own number
    objective: str = "balanced"
    slo: Mapping[str, float] = field(default_factory=dict)  # as by `parse_slo`
    quality: float = within(1.03, 1, 100)  # most that a format's perplexity may be over the checkpoint's
    quality_text: str = ""
    quality_tokens: int = 2048  # of `quality_text`
    seconds: float = within(120.0, 5, LARGEST)  # for everything
    held_out: tuple[Prompt, ...] = ()  # further prompts, which choose nothing and judge the choice afterwards
    settings: Mapping[str, Any] = field(default_factory=dict)  # further settings of LLM: backend, device
    only: Setting | None = None  # run this setting alone, beside plain decoding

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        check_ranges(self, lambda name: "--batch" if name == "batches" else flag(name))
        if not self.threads or any(t is not None and t < 1 for t in self.threads):
            raise ConfigError(f"threads are numbers of CPU threads, 1 or more, got {self.threads}")
        if len(self.prompts) < 2:
            raise ConfigError(f"give at least two prompts (--prompts FILE), not {len(self.prompts)}")
        if len({str(p.facts) for p in self.prompts}) < 2:
            raise ConfigError("all prompts are identical; give different ones (--prompts FILE)")

    @property
    def looked_at(self) -> tuple[int, ...]:
        """Batch sizes by which the objective judges settings."""
        if self.objective == "balanced":
            return self.batches
        return (max(self.batches) if self.objective in ("throughput", "memory") else min(self.batches),)


@dataclass(frozen=True)
class Setting:
    """One setting. Plain decoding has the draft "none"."""

    format: str
    kv_format: str
    spec: SpecConfig
    threads: int | None = None

    @classmethod
    def of(cls, chosen: Chosen) -> Setting:
        """The setting that a profile chose."""
        config = make_config(**chosen.settings())
        return cls(config.format, config.cache.format, resolve(config.spec).spec, config.threads)

    @property
    def plain(self) -> bool:
        return self.spec.method == "none"

    @property
    def draft(self) -> str:
        """The draft as --draft takes it."""
        return draft_text(self.spec, models=True)

    @property
    def draft_format(self) -> str:
        """Format of the draft's model; "auto" without a model."""
        return next((x.spec.format for x in Level.of(self.spec).every() if x.spec.model is not None), "auto")

    @property
    def draft_vocabulary(self) -> str:
        """What the draft's model may draft, as --draft-vocabulary; "all" for everything."""
        return next((str(v) for x in Level.of(self.spec).every() if (v := x.spec.options.get("vocabulary"))), "all")

    @property
    def formats(self) -> str:
        """Formats that differ from the checkpoint's own, such as "w4a8 kv int8"; "" for none."""
        kv = [f"kv {self.kv_format}"] if self.kv_format != "auto" else []
        return " ".join([self.format] * (self.format != "auto") + kv)

    @property
    def way(self) -> str:
        """The draft with its shape and format, without a length."""
        form = [f"draft {self.draft_format}"] if self.draft_format != "auto" else []
        shapes = [name for name, options in (("chain", CHAIN), ("siblings", LEAVES)) if _has(self.spec, options)]
        form += [f"vocabulary {self.draft_vocabulary}"] if self.draft_vocabulary != "all" else []
        return " ".join([self.draft, *shapes, *form])

    @property
    def label(self) -> str:
        """Name for display: what differs from plain decoding in the checkpoint's own format."""
        length = "goodput" if self.spec.policy == "goodput" else f"k={self.spec.num_draft_tokens}"
        words = ["plain"] if self.plain else [self.way, length]
        words += [f"threads={self.threads}"] if self.threads is not None else []
        return " ".join(filter(None, [*words, self.formats]))

    @property
    def target(self) -> tuple[str, str, int | None]:
        """Key of the settings that share one plain decoding."""
        return self.format, self.kv_format, self.threads

    @property
    def group(self) -> tuple[object, ...]:
        """Key of the settings that differ in draft length alone."""
        return *self.target, self.way


def options_of(spec: SpecConfig) -> dict[str, Any]:
    """The options of these levels as --draft-options takes them; empty where all have their defaults."""
    below = []
    for own in map(options_of, spec.below):
        lower = {"options": {k: v for k, v in own.items() if k != "below"}, "below": own.get("below")}
        below.append({name: value for name, value in lower.items() if value})
    return {**spec.options, **({"below": below} if any(below) else {})}


def shaped(spec: SpecConfig, shape: Mapping[str, object]) -> SpecConfig:
    """The same levels, with the options `CHAIN` or `LEAVES` where they exist."""

    def one(level: SpecConfig) -> SpecConfig:
        able = set(shape) <= {f.name for f in fields(drafter_class(level).Options)}
        return replace(level, options={**level.options, **shape}) if able else level

    return spec.with_each(one)


def _has(spec: SpecConfig, shape: Mapping[str, object]) -> bool:
    """Has a level these options?"""
    return any(shape.items() <= level.spec.options.items() for level in Level.of(spec).every())


def draft_specs(asked: TuneRequest) -> list[SpecConfig]:
    """Each draft in each format and shape that it can have. Raises ConfigError for an invalid draft."""
    found: list[SpecConfig] = []
    for text in asked.drafts:
        has_model = any(level.spec.model is not None for level in Level.of(make_config(text).spec).every())
        choices = product(asked.draft_formats, asked.draft_vocabularies) if has_model else [("auto", "all")]
        for form, vocabulary in choices:
            spec = resolve(make_config(text, policy="fixed", draft_format=form).spec).spec
            spec = spec if vocabulary == "all" else shaped(spec, {"vocabulary": vocabulary})
            found += [spec, *(one for shape in (CHAIN, LEAVES) if (one := shaped(spec, shape)) != spec)]
    return [spec for spec in found if spec.method != "none"]


def sizes_of(spec: SpecConfig) -> tuple[int, ...]:
    """Draft tokens of a chain, or nodes of a tree, in the grid."""
    if not Level.of(spec).branches:
        return LENGTHS
    return tuple(n for n in NODES if n <= 2 * LONGEST or not _has(spec, LEAVES))


def lengths_of(spec: SpecConfig) -> list[SpecConfig]:
    """A draft at every length (nodes of a tree), and with the goodput policy."""
    fixed = [replace(spec, num_draft_tokens=k, policy="fixed") for k in sizes_of(spec)]
    return [*fixed, replace(spec, num_draft_tokens=GOODPUT_DRAFT_TOKENS, policy="goodput")]


def tried(spec: SpecConfig) -> list[SpecConfig]:
    """A draft at the lengths of its trial: a chain's longest, or all sizes of a tree."""
    fixed = lengths_of(spec)[:-1]
    return fixed if Level.of(spec).branches else fixed[-1:]
