"""The settings that tuning looks at: which there are, what each promises by costs and acceptance, which may run.

Costs are measured without a text, and acceptance without a clock; every setting of the grid is simulated from both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from sameseed.config import GOODPUT_DRAFT_TOKENS, SpecConfig, draft_text
from sameseed.engine.build import models_of
from sameseed.engine.calibrate import measure_rounds
from sameseed.engine.engine import Engine
from sameseed.engine.levels import check_options, levels, with_heads
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError, SameseedError
from sameseed.models.loader import resolve_model
from sameseed.plan.acceptance import Replay, sizes_up_to
from sameseed.plan.cost import LevelCost, RoundCost
from sameseed.plan.replayer import Replayer
from sameseed.plan.simulate import Interval, Simulation, best_lengths, simulate
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme
from sameseed.study.measure import Bench
from sameseed.study.workload import Arm, Prompt, Workload

OBJECTIVES = ("balanced", "latency", "throughput", "ttft")
SURVIVORS = 6  # settings that run, beside plain decoding
PER_DRAFT = 2  # of them with one draft
REPLAYED = 12  # prompts whose texts drafts are replayed along
Tell = Callable[[str, int, int], None]  # stage, done, of so many


@dataclass(frozen=True)
class TuneRequest:
    """What is to be tuned. `drafts`: as --draft takes them, each in each of `draft_formats` where it has a model.

    `objective`: "latency" looks at the smallest of `batches`, "throughput" at the largest, "balanced" at their
    geometric mean, "ttft" at the time to the first token. `max_ttft`: seconds that it may take. `seconds`: for all.
    """

    model: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    drafts: tuple[str, ...]
    formats: tuple[str, ...] = ("auto",)
    kv_formats: tuple[str, ...] = ("auto",)
    draft_formats: tuple[str, ...] = ("auto",)
    batches: tuple[int, ...] = (1, 4)
    objective: str = "balanced"
    max_ttft: float | None = None
    seconds: float = 120.0
    settings: Mapping[str, Any] = field(default_factory=dict)  # further ones of LLM: threads, backend, device

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"batches are numbers of sequences, 1 or more, got {self.batches}")
        if len(self.prompts) < 2:
            raise ConfigError("one prompt tells nothing of others; give two or more with --prompts FILE")
        if len({(p.text, str(p.messages)) for p in self.prompts}) < 2:
            raise ConfigError("the prompts are all alike: what is right for one text is measured again and again")
        if self.seconds < 5:
            raise ConfigError(f"{self.seconds:g} seconds are too few to load and measure anything; give 30 or more")

    @property
    def looked_at(self) -> tuple[int, ...]:
        """Batch sizes by which settings are judged."""
        one = {"latency": min(self.batches), "ttft": min(self.batches), "throughput": max(self.batches)}
        return (one[self.objective],) if self.objective in one else self.batches


@dataclass(frozen=True)
class Setting:
    """One setting. Plain decoding has the draft "none"."""

    format: str
    kv_format: str
    spec: SpecConfig

    @property
    def draft(self) -> str:
        """How to guess, in the words of --draft."""
        return _named(self.spec)

    @property
    def draft_format(self) -> str:
        """That of the draft's model, "auto" without one."""
        return next((s.format for s in levels(self.spec) if s.model is not None), "auto")

    @property
    def label(self) -> str:
        """For people: what differs from plain decoding in the checkpoint's own format."""
        formats = [self.format] if self.format != "auto" else []
        formats += [f"kv {self.kv_format}"] if self.kv_format != "auto" else []
        if self.spec.method == "none":
            return " ".join(["plain", *formats])
        form = [f"draft {self.draft_format}"] if self.draft_format != "auto" else []
        length = "goodput" if self.spec.policy == "goodput" else f"k={self.spec.num_draft_tokens}"
        return " ".join([self.draft, length, *formats, *form])

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Settings that differ in length alone."""
        return self.format, self.kv_format, self.draft, self.draft_format


@dataclass
class Prospect:
    """A candidate with what it promises: tokens a second by batch size, and times as fast as plain decoding there."""

    candidate: Setting
    tokens_per_s: dict[int, Interval] = field(default_factory=dict)
    simulations: dict[int, Simulation] = field(default_factory=dict)

    def score(self, batches: Seq[int], bound: str = "value") -> float:
        """Geometric mean of tokens a second over these batch sizes; `bound`: "value", "low" or "high"."""
        return math.exp(sum(math.log(getattr(self.tokens_per_s[b], bound)) for b in batches) / len(batches))


def _named(spec: SpecConfig) -> str:
    """As --draft takes it: "suffix + path/to/head"; `draft_text` with the models' names."""
    if not spec.below:
        return spec.model or spec.method
    if spec.model is None and draft_text(spec).count(" + "):
        return " + ".join(_named(b) for b in spec.below)
    return " > ".join([*(_named(b) for b in spec.below), spec.model or spec.method])


def draft_specs(asked: TuneRequest) -> list[SpecConfig]:
    """Each draft in each format that it can have. Raises ConfigError for a draft that is none."""
    found: list[SpecConfig] = []
    for text in asked.drafts:
        has_model = any(level.model is not None for level in levels(make_config(text).spec))
        for form in asked.draft_formats if has_model else ("auto",):
            found.append(with_heads(make_config(text, policy="fixed", draft_format=form).spec))
    return [spec for spec in found if spec.method != "none"]


class TargetBench:
    """One target in one format, with an engine for each draft: it measures costs and acceptance, and runs settings."""

    def __init__(
        self, asked: TuneRequest, form: str, kv_form: str, specs: Seq[SpecConfig], load: Callable[..., Any]
    ) -> None:
        """Raises what LLM raises for a draft or a format that does not fit."""
        self.asked, self.format, self.kv_format = asked, form, kv_form
        self.specs = list(specs)
        self.settings = {**asked.settings, "format": form, "kv_format": kv_form, "max_num_seqs": max(asked.batches)}
        self._arms: dict[str, Arm] = {}  # by label
        self.bench = Bench(asked.model, [Arm("plain", SpecConfig()), *self._arm_list()], self.settings, load)
        self.prompts = tuple(p.encode(self.bench.llm.tokenizer) for p in asked.prompts)
        for prompt in self.prompts:
            self.bench.llm.engine.check(prompt)
        self.replays: dict[str, Replay] = {}

    def _arm_list(self) -> Iterator[Arm]:
        for spec in self.specs:
            for one in lengths_of(spec):
                made = Setting(self.format, self.kv_format, one)
                self._arms[made.label] = Arm(made.label, one)
                yield self._arms[made.label]

    @property
    def plain(self) -> Setting:
        return Setting(self.format, self.kv_format, SpecConfig())

    def engine(self, candidate: Setting) -> Engine:
        """The engine that decodes so."""
        return self.bench.install(self._arms.get(candidate.label, self.bench.arms[0]))

    def prospects(self, tell: Tell) -> list[Prospect]:
        """Every setting of this format, simulated: costs and acceptance are measured once for each draft."""
        few = _spread(self.prompts, REPLAYED)
        workload = Workload("tune", tuple(few), self.asked.params, 1)
        runner = self.bench.llm.engine.runner
        replayer = Replayer(self.asked.model, self.settings, max(self.asked.batches), runner)
        tell(f"{self.format}: writing texts", 0, 1)
        texts = replayer.texts(workload, lambda done, total: tell(f"{self.format}: writing texts", done, total))
        found = [Prospect(self.plain)]
        for i, spec in enumerate(self.specs):
            tell(f"{self.format}: replaying {_named(spec)}", i, len(self.specs))
            replay = replayer.replay(spec, texts, GOODPUT_DRAFT_TOKENS)
            cost = self._cost(spec)
            key = Setting("", "", spec)
            self.replays[key.draft + key.draft_format] = replay
            found += self._simulated(spec, replay, cost, found[0])
        if not self.specs:
            self._plain_only(found[0])
        return found

    def _cost(self, spec: SpecConfig) -> RoundCost:
        """What rounds with a draft cost; of drafters asked in turn, each one's proposals by themselves."""
        engine = self.engine(Setting(self.format, self.kv_format, lengths_of(spec)[0]))
        whole = RoundCost.of(measure_rounds(engine.runner, engine.drafter, 1.0))
        below = () if engine.drafter.owns else getattr(engine.drafter, "below", ())
        if not below:
            return whole
        each = [measure_rounds(engine.runner.beside(captures=d.captures), d, 1.0) for d in below]
        return replace(whole, levels=tuple(LevelCost.of(cost.draft) for cost in each))

    def _simulated(self, spec: SpecConfig, replay: Replay, cost: RoundCost, plain: Prospect) -> list[Prospect]:
        found = []
        for one in lengths_of(spec):
            prospect = Prospect(Setting(self.format, self.kv_format, one))
            for batch in self.asked.batches:
                if batch not in plain.simulations:
                    plain.simulations[batch] = simulate(replay, cost, 0, batch)
                    plain.tokens_per_s[batch] = plain.simulations[batch].tokens_per_s
                table: int | tuple[int, ...] = one.num_draft_tokens
                if one.policy == "goodput":
                    table = best_lengths(replay, cost, batch, margin=0.02)
                made = simulate(replay, cost, table, batch, plain=plain.simulations[batch])
                prospect.simulations[batch], prospect.tokens_per_s[batch] = made, made.tokens_per_s
            found.append(prospect)
        return found

    def _plain_only(self, plain: Prospect) -> None:
        engine = self.bench.llm.engine
        cost = RoundCost.of(measure_rounds(engine.runner, engine.drafter, 1.0))
        for batch in self.asked.batches:
            rows = cost.curve.at(batch) + cost.plain_gap
            plain.tokens_per_s[batch] = Interval(batch / rows, 0.8 * batch / rows, 1.2 * batch / rows)


def lengths_of(spec: SpecConfig) -> list[SpecConfig]:
    """A draft at every length, and with goodput."""
    fixed = [replace(spec, num_draft_tokens=k, policy="fixed") for k in sizes_up_to(8)]
    return [*fixed, replace(spec, num_draft_tokens=GOODPUT_DRAFT_TOKENS, policy="goodput")]


def _spread(found: Seq[Any], count: int) -> list[Any]:
    """At most `count`, from all over."""
    return list(found) if len(found) <= count else [found[i * len(found) // count] for i in range(count)]


def load_targets(
    asked: TuneRequest, load: Callable[..., Any], tell: Tell, lost: list[tuple[str, str]]
) -> list[TargetBench]:
    """The target in every format that loads with every draft; what does not is named in `lost`, with its reason."""
    specs, made = draft_specs(asked), []
    pairs = [(form, kv) for form in asked.formats for kv in asked.kv_formats]
    for i, (form, kv_form) in enumerate(pairs):
        tell(f"loading {asked.model} {form}", i, len(pairs))
        fitting = []
        for spec in specs:
            try:
                check_options(spec)
                models_of(spec, resolve_model(asked.model), QuantScheme.parse(form))
                fitting.append(spec)
            except SameseedError as error:
                lost.append((f"{_named(spec)} for {form}", str(error)))
        try:
            made.append(TargetBench(asked, form, kv_form, fitting, load))
        except SameseedError as error:
            lost.append((f"{form}, cache {kv_form}", str(error)))
    if not made:
        raise ConfigError("nothing fits: " + "; ".join(f"{what}: {why}" for what, why in lost))
    return made


def survivors(prospects: Seq[Prospect], asked: TuneRequest) -> list[Prospect]:
    """Those that run: plain decoding in each format, the best by what they may be, of each draft a few."""
    batches = asked.looked_at
    plain = [p for p in prospects if p.candidate.spec.method == "none"]
    drafting = [p for p in prospects if p.candidate.spec.method != "none"]
    drafting.sort(key=lambda p: p.score(batches, "high"), reverse=True)
    best_low = max(p.score(batches, "low") for p in prospects)
    taken: list[Prospect] = []
    for p in drafting:
        same = sum(q.candidate.group == p.candidate.group for q in taken)
        if len(taken) < SURVIVORS and same < PER_DRAFT and p.score(batches, "high") >= best_low:
            taken.append(p)
    if taken:  # what adapts itself is always among them, with the most promising draft
        best = taken[0].candidate.group
        adapting = [p for p in drafting if p.candidate.group == best and p.candidate.spec.policy == "goodput"]
        taken += [p for p in adapting if p not in taken]
    return [*plain, *taken]
