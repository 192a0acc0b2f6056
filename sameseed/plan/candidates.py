"""The settings of the grid: the speed that each promises by costs and counted acceptance, and which of them run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sameseed import ops
from sameseed.config import SpecConfig, draft_text
from sameseed.cost import experts
from sameseed.cost.round import NOTHING, Drafted, RoundCost, best, expected, lengths_by_batch
from sameseed.engine.build import check_parts
from sameseed.engine.calibrate import measure_engine, measure_rounds
from sameseed.engine.engine import Engine
from sameseed.engine.levels import Level
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError, SameseedError
from sameseed.measure.bench import Bench, Run, run_batch, shortened
from sameseed.measure.quality.data import take
from sameseed.measure.workload import Arm
from sameseed.models.loader import resolve_model
from sameseed.plan.grid import LONGEST, Setting, TuneRequest, draft_specs, lengths_of, sizes_of, tried
from sameseed.plan.race import OFF, Contestant
from sameseed.tuned import AcceptRates, Loser

SURVIVORS = 6  # drafting settings that run, beside plain decoding
PER_DRAFT = 2  # at most so many of them with the same draft
PROBE = 16  # tokens of the text that says how fast plain decoding is
TRIED = 12  # most prompts of a draft's trial
Tell = Callable[[str, int, int], None]  # (stage, number done, total)


@dataclass(frozen=True)
class TrialRun:
    """The rounds of one run, without the first of each output, which the prompt's pass decides."""

    num_rounds: int
    drafts: NDArray[np.int64]  # int [n, 2]: drafted and accepted tokens of each round with a draft
    shares: tuple[float, ...]  # of rounds with a draft, by each drafter that is asked in turn

    @classmethod
    def of(cls, run: Run, in_turn: bool) -> TrialRun:
        """`in_turn`: does the drafter ask others in turn, which have counts of their own?"""
        num_rounds = max(1, run.metrics.num_rounds - len(run.completions))
        pairs = [pair for done in run.completions for pair in done.metrics.spec.rounds or ()]
        counts = [m.num_drafts for m in run.levels.values()] if in_turn else [len(pairs)]
        return cls(num_rounds, np.array(pairs, np.int64).reshape(-1, 2), tuple(n / num_rounds for n in counts))


@dataclass(frozen=True)
class Trial:
    """What a draft brings, counted in short runs, by draft tokens (nodes of a tree).

    The longest run of a chain tells for shorter ones too: cut to k tokens, a round drafts and accepts at most k. Trees
    are not cut, so each of their sizes runs.
    """

    runs: Mapping[int, TrialRun]

    def _cut(self, k: int) -> tuple[TrialRun, NDArray[np.int64]]:
        """The shortest run with drafts of at least `k` tokens, and its drafts cut to them."""
        run = self.runs[min((size for size in self.runs if size >= k), default=max(self.runs))]
        return run, np.minimum(run.drafts, k)

    def drafted(self, k: int) -> Drafted:
        """The mean round with drafts of at most `k` tokens, for `expected`."""
        run, drafts = self._cut(k)
        counts = np.bincount(drafts[:, 0], minlength=1)
        counts[0] = run.num_rounds - len(drafts)
        steps = min(float(drafts[:, 0].mean()), LONGEST) if len(drafts) else 0.0
        accepted = float(drafts[:, 1].sum()) / run.num_rounds
        return Drafted(accepted, tuple((counts / run.num_rounds).tolist()), tuple((s, steps) for s in run.shares))

    def rates(self, k: int) -> AcceptRates:
        """How often each place of drafts of at most `k` tokens was accepted."""
        run, drafts = self._cut(k)
        accepted = drafts[:, 1]
        alive = [run.num_rounds, *(int((accepted > i).sum()) for i in range(int(accepted.max(initial=0))))]
        conditional = tuple(now / before for before, now in pairwise(alive))
        marginal = tuple(n / run.num_rounds for n in alive[1:])
        return AcceptRates(conditional, marginal, 1.0 + float(accepted.sum()) / run.num_rounds, run.num_rounds)


class TargetBench:
    """One target in one format, with an engine for each draft: measures costs and acceptance, and runs settings."""

    def __init__(
        self, asked: TuneRequest, form: str, kv_form: str, specs: Seq[SpecConfig], load: Callable[..., Any]
    ) -> None:
        """Raises what LLM raises for a draft or a format that does not fit."""
        self.asked, self.format, self.kv_format = asked, form, kv_form
        self.ways = {self.setting(spec).way: spec for spec in specs}
        self.settings = {**asked.settings, "format": form, "kv_format": kv_form, "max_num_seqs": max(asked.batches)}
        every = [SpecConfig(), *(one for spec in specs for one in lengths_of(spec))]
        labels = {self.setting(spec, threads).label: spec for spec in every for threads in asked.threads}
        self._arms = {label: Arm(label, spec) for label, spec in labels.items()}
        self.bench = Bench(asked.model, list(self._arms.values()), self.settings, load)
        self.jobs, self.held_out = (
            [job for batch in self.bench.workload("tune", prompts, asked.params).batches() for job in batch]
            for prompts in (asked.prompts, asked.held_out)
        )
        self.config = self.bench.llm.engine.runner.model.config  # with the experts that its texts choose
        self.trials: dict[str, Trial] = {}  # by `Setting.way`
        self.tried = take(range(len(asked.prompts)), TRIED)  # numbers of the prompts of trials
        self.costs: dict[tuple[str, int | None], RoundCost] = {}  # by `Setting.way` and threads
        self.mean_tokens = float(asked.params.max_tokens)  # mean tokens of a text
        self.mean_prompt = sum(len(prompt) for prompt, _ in self.jobs) / len(self.jobs)

    @property
    def name(self) -> str:
        """The formats, for display."""
        return self.setting(SpecConfig()).formats or "auto"

    @property
    def context(self) -> float:
        """Mean cached tokens of a sequence."""
        return self.mean_prompt + self.mean_tokens / 2

    def setting(self, spec: SpecConfig, threads: int | None = None) -> Setting:
        """A draft with this target."""
        return Setting(self.format, self.kv_format, spec, threads)

    def engine(self, setting: Setting) -> Engine:
        """The engine that decodes with this setting; its number of threads is set, too."""
        if setting.threads is not None:
            ops.set_num_threads(setting.threads)
        return self.bench.install(self._arms[setting.label])

    def seconds_of_text(self) -> float:
        """Seconds that plain decoding of one prompt takes: the least of three short runs."""
        engine, probe = self.engine(self.setting(SpecConfig(), self.asked.threads[0])), shortened(self.jobs[:1], PROBE)
        runs = [run_batch(engine, probe) for _ in range(3)]
        return min(run.seconds / max(1, run.num_tokens) for run in runs) * self.asked.params.max_tokens

    def prospects(self, tell: Tell, end: float, lost: list[Loser]) -> list[Contestant]:
        """Predict every setting; each draft is measured once, or named in `lost` where its turn comes after `end`."""
        for i, (way, spec) in enumerate(self.ways.items()):
            if self.trials and time.perf_counter() > end:
                lost.append(no_time(f"{way}, {self.name}", self.asked))
                continue
            tell(f"{self.name}: trying {way}", i, len(self.ways))
            self.trials[way] = self.trial(spec)
        return [p for threads in self.asked.threads for p in self._promised(threads, tell, end, lost)]

    def trial(self, spec: SpecConfig) -> Trial:
        """Run a draft on a few prompts, as many at once as the largest batch."""
        runs = {}
        for one in tried(spec):
            engine = self.engine(self.setting(one, self.asked.threads[0]))
            run = run_batch(engine, [self.jobs[i] for i in self.tried])
            runs[one.num_draft_tokens] = TrialRun.of(run, bool(Level.of(spec).in_turn))
            self.mean_tokens = run.num_tokens / len(run.completions)
        if not self.trials:
            self.config = experts.count(self.bench.llm.engine.runner, resolve_model(self.asked.model), run.completions)
        return Trial(runs)

    def _cost(self, spec: SpecConfig, threads: int | None) -> RoundCost:
        """Measured costs of rounds with a draft; of drafters asked in turn, each one's proposals are measured alone."""
        engine = self.engine(self.setting(lengths_of(spec)[0] if spec.method != "none" else spec, threads))
        own = measure_engine(engine, 1.0)
        # The quicker of two prompts tells how long prompts take.
        read = min(run_batch(engine, [job]).seconds / len(job[0]) for job in shortened(self.jobs[:2], 1))
        below = () if engine.drafter.owns else getattr(engine.drafter, "below", ())
        each = [measure_rounds(engine.runner.beside(captures=d.captures), d, 1.0) for d in below] or [own]
        passes = experts.in_texts(own.target, self.config)
        return RoundCost(passes, tuple(each), own.gap, lambda tokens: read * tokens)

    def _contestants(self, specs: Seq[SpecConfig], threads: int | None) -> list[Contestant]:
        """Settings that differ in draft length alone, with their bytes."""
        longest = max(len(prompt) for prompt, _ in self.jobs) + self.asked.params.max_tokens
        config = make_config(specs[0], **self.settings)
        blocks = -(-longest // config.cache.block_size) * self.asked.looked_at[-1]
        demands = check_parts(resolve_model(self.asked.model), config).demands
        num_bytes = sum(d.weights + d.states + blocks * d.block for d in demands)
        settings = [self.setting(spec, threads) for spec in specs]
        return [Contestant(s, partial(self.engine, s), self.jobs, num_bytes=num_bytes) for s in settings]

    def _promised(self, threads: int | None, tell: Tell, end: float, lost: list[Loser]) -> list[Contestant]:
        """Predict all settings with this number of threads, plain decoding first.

        The costs of each draft come from another moment of the machine, whose speed drifts. So a draft's prediction is
        its speed-up over plain decoding at that moment. Plain decoding itself takes its median over the moments.
        """
        costs: dict[str, RoundCost] = {}
        for i, way in enumerate(self.trials):
            if costs and time.perf_counter() > end:
                lost.append(no_time(f"{way}, {self.name}", self.asked))
                continue
            tell(f"{self.name}: costs of {way}", i, len(self.trials))
            costs[way] = self.costs[way, threads] = self._cost(self.ways[way], threads)
        moments = [*costs.values()] or [self._cost(SpecConfig(), threads)]
        found = plain, *_ = self._contestants([SpecConfig()], threads)
        for batch in self.asked.batches:
            rounds = [expected(cost, NOTHING, 0, batch, self.context) for cost in moments]
            speeds = [
                batch * self.mean_tokens / (batch * cost.prompt(self.mean_prompt) + self.mean_tokens * x.plain)
                for cost, x in zip(moments, rounds, strict=True)
            ]
            plain.promised[batch], plain.rounds[batch] = median(speeds), rounds[0]
        for way, cost in costs.items():
            found += self.promised(way, cost, plain, threads)
        return found

    def promised(self, way: str, cost: RoundCost, plain: Contestant, threads: int | None) -> list[Contestant]:
        """Predict all lengths of a draft with `cost`, prompts included, by the tokens/s predicted for `plain`."""
        spec, trial = self.ways[way], self.trials[way]
        found = self._contestants(lengths_of(spec), threads)
        for prospect in found:
            for batch in self.asked.batches:
                k = prospect.setting.spec.num_draft_tokens
                if prospect.setting.spec.policy == "goodput":
                    k = best(cost, trial, sizes_of(spec), batch, self.context)[0]
                x = prospect.rounds[batch] = expected(cost, trial, k, batch, self.context)
                before, after = (batch * cost.prompt(self.mean_prompt, use) for use in (False, k > 0))
                prospect.promised[batch] = x.whole(before, after, self.mean_tokens) * plain.promised[batch]
        return found

    def lengths(self, setting: Setting) -> tuple[tuple[int, int], ...]:
        """The setting's own length, or those that goodput would choose, as (first batch, length) rows."""
        if setting.spec.policy != "goodput":
            return () if setting.plain else ((1, setting.spec.num_draft_tokens),)
        trial, cost = self.trials[setting.way], self.costs[setting.way, setting.threads]
        rows = lengths_by_batch(cost, trial, sizes_of(setting.spec), max(self.asked.batches), self.context)
        return tuple((first, k) for first, _, k in rows)


def no_time(setting: str, asked: TuneRequest) -> Loser:
    """The entry of a setting that there was no time to measure."""
    return Loser({"setting": setting}, "time", note=f"none was left for it: give more than --seconds {asked.seconds:g}")


def load_targets(
    asked: TuneRequest, load: Callable[..., Any], tell: Tell, lost: list[Loser], end: float = math.inf
) -> list[TargetBench]:
    """Load the target in every format, with every draft that fits; failures are named in `lost` with the reason.

    Formats not loaded by `end` (of `perf_counter`), except the first, are named there, too. Raises ConfigError where no
    format loads, or where no draft fits.
    """
    specs, folder = draft_specs(asked), resolve_model(asked.model)
    made: list[TargetBench] = []
    pairs = [(form, kv) for form in asked.formats for kv in asked.kv_formats]
    for i, (form, kv_form) in enumerate(pairs):
        if made and time.perf_counter() > end:
            lost.append(no_time(f"{form}, cache {kv_form}", asked))
            continue
        tell(f"loading {asked.model} {form}", i, len(pairs))
        fitting = []
        for spec in specs:
            try:
                settings = {**asked.settings, "format": form, "kv_format": kv_form}
                check_parts(folder, make_config(spec, **settings))
                fitting.append(spec)
            except SameseedError as error:
                way = {"setting": f"{draft_text(spec, models=True)} for {form}"}
                lost.append(Loser(way, "impossible", note=str(error)))
        try:
            made.append(TargetBench(asked, form, kv_form, fitting, load))
        except SameseedError as error:
            lost.append(Loser({"setting": f"{form}, cache {kv_form}"}, "impossible", note=str(error)))
    if not made or (specs and not any(bench.ways for bench in made)):
        what = "nothing fits" if not made else "none of the drafts fits this target"
        raise ConfigError(f"{what}: " + "; ".join(dict.fromkeys(f"{x.settings['setting']}: {x.note}" for x in lost)))
    return made


def survivors(prospects: Seq[Contestant], asked: TuneRequest) -> list[Contestant]:
    """The settings that run: those that may be the best, a few of each draft, and the first plain decoding.

    Plain decoding in another format runs where it may win, or where a draft in that format runs: their texts must be
    equal.
    """
    batches, by_memory = asked.looked_at, asked.objective == "memory"
    plain = [p for p in prospects if p.setting.plain]
    drafting = [p for p in prospects if not p.setting.plain and asked.only in (None, p.setting)]
    if asked.only is not None and not drafting:
        raise ConfigError(f"tune does not try {asked.only.label}, which the profile chose; tune again")
    drafting.sort(key=lambda p: (p.num_bytes if by_memory else 0, -p.score(batches)))
    least = 0.0 if by_memory else max(p.score(batches) for p in prospects) * math.exp(-2 * OFF)
    taken: list[Contestant] = []
    for p in drafting:
        same = sum(q.setting.group == p.setting.group for q in taken)
        if asked.only or (len(taken) < SURVIVORS and same < PER_DRAFT and p.score(batches) >= least):
            taken.append(p)
    if taken:  # the goodput policy is always among them, with the most promising draft
        first = taken[0].setting.group
        adapting = [p for p in drafting if p.setting.group == first and p.setting.spec.policy == "goodput"]
        taken += [p for p in adapting if p not in taken]
    targets = {p.setting.target for p in taken}
    rivals = [p for p in plain[1:] if p.setting.target in targets or p.score(batches) >= least > 0.0]
    return [plain[0], *rivals, *taken]
