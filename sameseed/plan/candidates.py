"""The settings of the grid: the speed that each promises, from costs and acceptance, and which settings run.

Passes are timed without a text, and a short run of each draft counts what is accepted (`trials.py`). Both predict every
setting of the grid, by the mean round; the race that follows decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from sameseed import ops
from sameseed.config import SpecConfig, draft_text
from sameseed.cost import experts
from sameseed.cost.round import NOTHING, RoundCost, best, expected, lengths_by_batch
from sameseed.engine.build import check_parts
from sameseed.engine.calibrate import measure_engine, measure_rounds
from sameseed.engine.engine import Engine
from sameseed.engine.levels import Level
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError, SameseedError
from sameseed.measure.bench import Bench, Run, run_batch
from sameseed.measure.quality.data import take
from sameseed.measure.workload import Arm
from sameseed.models.loader import resolve_model
from sameseed.plan.grid import LONGEST, Setting, TuneRequest, draft_specs, lengths_of, sizes_of, tried
from sameseed.plan.race import OFF, Contestant
from sameseed.plan.trials import Trial, TrialRun
from sameseed.tuned import Loser

SURVIVORS = 6  # drafting settings that run, beside plain decoding
PER_DRAFT = 2  # at most so many of them with the same draft
PROBE = 16  # tokens of the text that says how fast plain decoding is
TRIED = 12  # most prompts of a draft's trial
Tell = Callable[[str, int, int], None]  # (stage, number done, total)


class TargetBench:
    """One target in one format, with an engine for each draft: measures costs and acceptance, and runs settings."""

    def __init__(
        self, asked: TuneRequest, form: str, kv_form: str, specs: Seq[SpecConfig], load: Callable[..., Any]
    ) -> None:
        """Raises what LLM raises for a draft or a format that does not fit."""
        self.asked, self.format, self.kv_format = asked, form, kv_form
        self.specs = list(specs)
        self.settings = {**asked.settings, "format": form, "kv_format": kv_form, "max_num_seqs": max(asked.batches)}
        self._arms = {s.label: Arm(s.label, s.spec) for s in self._settings()}
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

    def seconds_of_text(self) -> float:
        """Seconds that plain decoding of one prompt takes: the least of three short runs."""
        plain, (prompt, params) = next(self._settings()), self.jobs[0]
        runs = [Run() for _ in range(3)]
        for run in runs:
            run_batch(self.engine(plain), [(prompt, replace(params, max_tokens=min(PROBE, params.max_tokens)))], run)
        return min(run.seconds / max(1, run.num_tokens) for run in runs) * params.max_tokens

    def _setting(self, spec: SpecConfig, threads: int | None) -> Setting:
        return Setting(self.format, self.kv_format, spec, threads)

    def _contestant(self, setting: Setting) -> Contestant:
        return Contestant(setting, partial(self.engine, setting), self.jobs)

    def _settings(self) -> Iterator[Setting]:
        for threads in self.asked.threads:
            yield self._setting(SpecConfig(), threads)
            for spec in self.specs:
                yield from (self._setting(one, threads) for one in lengths_of(spec))

    @property
    def name(self) -> str:
        """The formats, for display."""
        return self._setting(SpecConfig(), None).formats or "auto"

    def engine(self, setting: Setting) -> Engine:
        """The engine that decodes with this setting; its number of threads is set, too."""
        if setting.threads is not None:
            ops.set_num_threads(setting.threads)
        return self.bench.install(self._arms[setting.label])

    def prospects(self, tell: Tell, end: float, lost: list[Loser]) -> list[Contestant]:
        """Predict every setting of this format; costs and acceptance are measured once for each draft.

        A draft whose turn comes after `end` (of `perf_counter`) is not measured, and is named in `lost`.
        """
        for i, spec in enumerate(self.specs):
            way = self._setting(spec, None).way
            if self.trials and time.perf_counter() > end:
                lost.append(no_time(f"{way}, {self.name}", self.asked))
                continue
            tell(f"{self.name}: trying {way}", i, len(self.specs))
            self.trials[way] = self._trial(spec)
        found = [p for threads in self.asked.threads for p in self._promised(threads, tell, end, lost)]
        longest = max(len(prompt) for prompt, _ in self.jobs) + self.asked.params.max_tokens
        known: dict[str, int] = {}
        for prospect in found:
            way = prospect.setting.way
            if way not in known:
                config = make_config(prospect.setting.spec, **self.settings)
                demands = check_parts(resolve_model(self.asked.model), config).demands
                blocks = -(-longest // config.cache.block_size) * self.asked.looked_at[-1]
                known[way] = sum(d.weights + d.states + blocks * d.block for d in demands)
            prospect.num_bytes = known[way]
        return found

    def _trial(self, spec: SpecConfig) -> Trial:
        """Run a draft on a few prompts, as many at once as the largest batch."""
        runs = {}
        for one in tried(spec):
            run = Run()
            run_batch(self.engine(self._setting(one, self.asked.threads[0])), [self.jobs[i] for i in self.tried], run)
            runs[one.num_draft_tokens] = TrialRun.of(run, bool(Level.of(spec).in_turn))
            self.mean_tokens = run.num_tokens / len(run.completions)
        if not self.trials:
            self.config = experts.count(self.bench.llm.engine.runner, resolve_model(self.asked.model), run.completions)
        return Trial(runs, LONGEST)

    def _cost(self, spec: SpecConfig, threads: int | None) -> RoundCost:
        """Measured costs of rounds with a draft; of drafters asked in turn, each one's proposals are measured alone."""
        engine = self.engine(self._setting(lengths_of(spec)[0] if spec.method != "none" else spec, threads))
        own = measure_engine(engine, 1.0)
        prompt = self._prompt(engine)
        below = () if engine.drafter.owns else getattr(engine.drafter, "below", ())
        each = [measure_rounds(engine.runner.beside(captures=d.captures), d, 1.0) for d in below] or [own]
        return RoundCost(experts.in_texts(own.target, self.config), tuple(each), own.gap, prompt)

    def _prompt(self, engine: Engine) -> Callable[[float], float]:
        """Seconds of the target's passes over a prompt: the less of two prompts that were read."""
        reads = []
        for prompt, params in self.jobs[:2]:
            run_batch(engine, [(prompt, replace(params, max_tokens=1, min_tokens=0))], run := Run())
            reads.append(run.seconds / len(prompt))
        return lambda tokens: min(reads) * tokens

    def _promised(self, threads: int | None, tell: Tell, end: float, lost: list[Loser]) -> list[Contestant]:
        """Predict all settings with this number of threads, plain decoding first.

        The costs of each draft come from another moment of the machine, whose speed drifts. So a draft's prediction is
        its speed-up over plain decoding at that moment. Plain decoding itself takes its median over the moments.
        """
        plain = self._contestant(self._setting(SpecConfig(), threads))
        measured = [spec for spec in self.specs if self._setting(spec, None).way in self.trials]
        found: list[tuple[SpecConfig, RoundCost]] = []
        for i, spec in enumerate(measured):
            tell(f"{self.name}: costs of {self._setting(spec, threads).way}", i, len(measured))
            way = self._setting(spec, None).way
            if found and time.perf_counter() > end:
                lost.append(no_time(f"{way}, {self.name}", self.asked))
                continue
            self.costs[way, threads] = self._cost(spec, threads)
            found.append((spec, self.costs[way, threads]))
        moments = [cost for _, cost in found] or [self._cost(SpecConfig(), threads)]
        for batch in self.asked.batches:
            rounds = [expected(cost, NOTHING, 0, batch, self.context) for cost in moments]
            speeds = [
                batch * self.mean_tokens / (batch * cost.prompt(self.mean_prompt) + self.mean_tokens * x.plain)
                for cost, x in zip(moments, rounds, strict=True)
            ]
            plain.promised[batch], plain.rounds[batch] = median(speeds), rounds[0]
        return [plain, *(p for spec, cost in found for p in self.promised(spec, cost, plain, threads))]

    @property
    def context(self) -> float:
        """Mean cached tokens of a sequence."""
        return self.mean_prompt + self.mean_tokens / 2

    def promised(self, spec: SpecConfig, cost: RoundCost, plain: Contestant, threads: int | None) -> list[Contestant]:
        """Predict all lengths of a draft with `cost`, prompts included, by the tokens/s predicted for `plain`."""
        found, trial = [], self.trials[self._setting(spec, None).way]
        for one in lengths_of(spec):
            prospect = self._contestant(self._setting(one, threads))
            for batch in self.asked.batches:
                k = one.num_draft_tokens
                if one.policy == "goodput":
                    k = best(cost, trial, sizes_of(spec), batch, self.context)[0]
                x = prospect.rounds[batch] = expected(cost, trial, k, batch, self.context)
                before, after = (batch * cost.prompt(self.mean_prompt, use) for use in (False, k > 0))
                speedup = x.whole(before, after, self.mean_tokens)
                prospect.promised[batch] = speedup * plain.promised[batch]
            found.append(prospect)
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
    if not made or (specs and not any(bench.specs for bench in made)):
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
