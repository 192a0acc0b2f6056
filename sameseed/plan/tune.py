"""Tuning: chooses draft, formats and draft length for a model, machine and workload, by prediction and a race."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from sameseed import ops, store
from sameseed.engine.learned import machine_here
from sameseed.errors import ConfigError
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.quality.data import take
from sameseed.measure.workload import check_batches
from sameseed.models.loader import resolve_model
from sameseed.plan import quality
from sameseed.plan.candidates import TargetBench, Tell, Trial, load_targets, no_time, survivors
from sameseed.plan.grid import Setting, TuneRequest, options_of, tried
from sameseed.plan.race import Contestant, anew, first_rung, missed, race, ratio
from sameseed.report import record
from sameseed.tuned import AcceptRates, Chosen, Loser, Scope, Tuned, TunedFigure, TunedMachine, TunedModel

MEASURE_SHARE = 0.6  # share of the time within which drafts are measured
# The smallest tuning: seconds that costs of a draft take at a small model (`measure_engine`), and texts: two prompts
# of a trial, run by plain decoding and one draft, with warm-ups, and passes of the costs at a large model.
START, LEAST_TEXTS = 4.0, 13
TRIAL_SHARE = 0.25  # share of the time left for trials
RACE_SHARE = 0.9  # share of the time left for the race


@dataclass(frozen=True)
class TuneOutcome:
    """Results of tuning."""

    asked: TuneRequest
    order: list[Contestant]  # settings that ran, the best (or `asked.only`) first
    plain: Contestant  # plain decoding in the first format
    prospects: list[Contestant]  # all that were predicted
    trials: Mapping[str, Trial]
    lost: list[Loser]  # what could not be tried, and why
    differing: list[str]  # labels of settings whose texts differ from plain decoding's: something is broken
    seconds: float
    quality: quality.Ratios = field(default_factory=dict)  # perplexity ratios by formats
    missed: str | None = None  # the bounds that even the best does not keep
    by_batch: tuple[tuple[int, int], ...] = ()  # (first batch, length) rows of the chosen draft
    held_out: Seq[Contestant] = ()  # all settings, to run on the prompts held out

    @property
    def best(self) -> Contestant:
        return self.order[0]

    def speedup(self, contestant: Contestant, batch: int | None = None) -> TunedFigure:
        """Measured speed-up over plain decoding in the first format; None: over the batch sizes of the objective."""
        return ratio(contestant, self.plain, self.asked.looked_at if batch is None else (batch,))


def tune(asked: TuneRequest, load: Callable[..., Any], tell: Tell = lambda stage, done, total: None) -> TuneOutcome:
    """Measure, predict, race. `load` makes an LLM, as for a Bench. Raises ConfigError where nothing can be tried."""
    check_batches(asked.batches, len(asked.prompts))
    start, threads = time.perf_counter(), ops.num_threads()
    lost: list[Loser] = []
    try:
        end = start + MEASURE_SHARE * asked.seconds
        targets = load_targets(asked, load, tell, lost, end)
        asked = _within(asked, targets, time.perf_counter() - start, lost)
        known: quality.Ratios = {}
        if asked.only is None and any((t.format, t.kv_format) != ("auto", "auto") for t in targets):
            known = quality.measure(asked, targets, load, tell)
            targets = quality.kept(asked, targets, known, lost)
        prospects = [(target, p) for target in targets for p in target.prospects(tell, end, lost)]
        wanted = survivors([p for _, p in prospects], asked)
        runners = [p for _, p in prospects if p in wanted]
        tokens = max(target.mean_tokens for target in targets)
        left = asked.seconds - (time.perf_counter() - start)
        runners, asked = affordable(runners, asked, tokens, left, lost)
        for c in runners:  # warm-up of caches, pages and threads
            few = range(min(*asked.batches, len(asked.prompts)))
            anew(c).run(len(few), few)
        left = RACE_SHARE * (asked.seconds - (time.perf_counter() - start))
        order = race(runners, asked, len(asked.prompts), left, tell)
        order.sort(key=lambda c: c.setting != asked.only)
    finally:
        ops.set_num_threads(threads)
    plain = next(c for c in runners if c.plain)
    return TuneOutcome(
        asked,
        order,
        plain,
        prospects=[p for _, p in prospects],
        trials={way: trial for target in targets for way, trial in target.trials.items()},
        lost=lost,
        differing=differing(runners),
        seconds=time.perf_counter() - start,
        quality=known,
        missed=missed(order[0], asked),
        by_batch=next(target.lengths(p.setting) for target, p in prospects if p is order[0]),
        held_out=[anew(p, target.held_out) for target, p in prospects],
    )


def again(asked: TuneRequest, before: Tuned) -> TuneRequest:
    """The request that measures only what a profile chose, on the texts and loads of its tuning.

    The first of `asked.formats` stays, because speed-ups are over plain decoding in it. Raises ConfigError where
    the machine, the weights or the prompts are others.
    """
    scope, setting = before.scope, Setting.of(before.chosen)
    if setting.plain:
        raise ConfigError("the profile chose plain decoding: there is nothing to check; tune again")
    why = before.machine.differs(_machine(asked, setting))
    if why is None and before.model.digest not in ("", found := store.weights_key(resolve_model(asked.model))):
        why = f"weights {before.model.digest} there, {found} here"
    if why is not None:
        raise ConfigError(f"the profile was tuned for something else ({why}); tune again")
    prompts = asked.prompts[: scope.num_prompts or None]
    if scope.prompts not in ("", _digest(prompts)):
        raise ConfigError("the profile was tuned on other prompts: give the --prompts and --num-prompts of its tuning")
    longest, temperature = max(scope.output_tokens, default=0), (*scope.temperature, asked.params.temperature)[0]
    params = replace(asked.params, max_tokens=longest or asked.params.max_tokens, temperature=temperature)
    return replace(
        asked,
        prompts=prompts,
        params=params,
        drafts=(setting.draft,),
        formats=tuple(dict.fromkeys((asked.formats[0], setting.format))),
        kv_formats=tuple(dict.fromkeys((asked.kv_formats[0], setting.kv_format))),
        draft_formats=(setting.draft_format,),
        draft_vocabularies=(setting.draft_vocabulary,),
        batches=scope.batch or asked.batches,
        threads=(setting.threads,),
        only=setting,
    )


def _within(asked: TuneRequest, targets: list[TargetBench], spent: float, lost: list[Loser]) -> TuneRequest:
    """The request scaled to its seconds, before anything is measured but one text: batch sizes and prompts of trials.

    Raises ConfigError with the least seconds that do where not even the smallest tuning fits after loading.
    """
    text, left = targets[0].seconds_of_text(), asked.seconds - spent
    least = START + LEAST_TEXTS * text
    if left < least:
        raise ConfigError(
            f"--seconds {asked.seconds:g} are too few: loading took {spent:.0f} s, and the smallest tuning takes "
            f"{least:.0f} s: give --seconds {math.ceil(1.2 * (spent + least) / 10) * 10} or more, or a shorter "
            "--max-tokens"
        )
    small = asked
    while len(small.batches) > 1 and small.looked_at == small.batches and left < least * len(small.batches):
        lost.append(no_time(f"batch {max(small.batches)}", asked))
        small = replace(small, batches=tuple(b for b in small.batches if b != max(small.batches)))
    for target in targets:
        target.asked = small
        runs = sum(len(tried(spec)) for spec in target.ways.values()) / max(small.batches)  # all trials of a prompt
        num_prompts = max(2, min(len(target.tried), int(TRIAL_SHARE * left / len(targets) / max(text * runs, 1e-9))))
        target.tried = take(target.tried, num_prompts)
    return small


def affordable(
    runners: list[Contestant], asked: TuneRequest, tokens: float, left: float, lost: list[Loser]
) -> tuple[list[Contestant], TuneRequest]:
    """Contestants whose first rung fits in the time left: plain decoding, then the best; fewer prompts if need be."""
    reference, by_memory = next(c for c in runners if c.plain), asked.objective == "memory"

    def hope(c: Contestant) -> tuple[float, ...]:
        other = asked.only is not None and c.setting != asked.only
        return c is not reference, other, c.num_bytes if by_memory else 0, -c.score(asked.looked_at)

    found: list[Contestant] = []
    taken, num_tokens = 0.0, first_rung(len(asked.prompts), asked.batches) * tokens
    for c in sorted(runners, key=hope):
        needed = sum(num_tokens / c.promised[b] for b in asked.batches)
        if len(found) < 2 or taken + needed <= left:
            found.append(c)
            taken += needed
    if taken > left and len(found) < 3:
        fitting = max(2, *asked.batches, int(left / taken * first_rung(len(asked.prompts), asked.batches)))
        if fitting < len(asked.prompts):
            lost.append(no_time(f"{len(asked.prompts) - fitting} of {len(asked.prompts)} prompts", asked))
            asked = replace(asked, prompts=asked.prompts[:fitting])
    lost += [no_time(c.label, asked) for c in runners if c not in found]
    return [c for c in runners if c in found], asked


def differing(runners: Seq[Contestant]) -> list[str]:
    """Labels of settings whose outputs differ from those of plain decoding in their format."""
    found = []
    for c in runners:
        plain = next((p for p in runners if p.plain and p.setting.target == c.setting.target), c)
        if any(own != its for batch in c.runs for own, its in zip(c.texts(batch), plain.texts(batch))):
            found.append(c.label)
    return found


def as_tuned(found: TuneOutcome) -> Tuned:
    """The profile that `serve --profile` reads."""
    asked, best, setting = found.asked, found.best, found.best.setting
    spec, drafting = setting.spec, not setting.plain
    batches = sorted(asked.batches)
    measured = {f"speedup_batch_{b}": found.speedup(best, b) for b in batches}
    promised = {f"speedup_batch_{b}": best.over(found.plain, b) for b in batches}
    predicted = {name: replace(x, error=x.value / measured[name].value - 1.0) for name, x in promised.items()}
    measured |= {f"tokens_per_s_batch_{b}": TunedFigure(*(3 * (best.tokens_per_s(b),))) for b in batches}
    trial = found.trials.get(setting.way)
    ratios = found.quality.get((setting.format, setting.kv_format))
    prompts = [len(prompt) for prompt, _ in found.plain.jobs[: len(asked.prompts)]]
    tokens = [len(text) for batch in batches for text in found.plain.texts(batch)]
    return Tuned(
        machine=_machine(asked, setting),
        model=TunedModel(asked.model, store.weights_key(resolve_model(asked.model))),
        chosen=Chosen(
            format=setting.format,
            kv_format=setting.kv_format,
            draft=setting.draft,
            draft_format=setting.draft_format if drafting else None,
            num_draft_tokens=spec.num_draft_tokens if drafting else None,
            draft_options=options_of(spec) or None,
            policy=spec.policy if drafting else None,
            max_num_seqs=max(batches) if drafting and spec.policy == "fixed" else None,  # a length is for its loads
            threads=setting.threads,
            by_batch=found.by_batch,
        ),
        scope=Scope(
            _digest(asked.prompts),
            len(asked.prompts),
            tuple(sorted({p.domain for p in asked.prompts if p.domain})),
            (min(prompts), max(prompts)),
            (min(tokens), max(tokens)),
            (asked.params.temperature,),
            tuple(sorted(asked.batches)),
            max(prompts) + max(tokens),
        ),
        predicted=predicted,
        measured=measured,
        quality={} if ratios is None else {"perplexity_ratio": ratios},
        acceptance=AcceptRates() if trial is None else trial.rates(spec.num_draft_tokens),
        rejected=tuple(losers(found)),
        date=record.now(),
        commit=record.commit(),
    )


def _machine(asked: TuneRequest, setting: Setting) -> TunedMachine:
    """This machine, with the threads of the setting."""
    here = machine_here(str(asked.settings.get("device", "cpu")))
    return here if setting.threads is None or here.gpu else replace(here, threads=setting.threads)


def _digest(prompts: Seq[Prompt]) -> str:
    return store.digest({"prompts": [p.facts for p in prompts]})


def losers(found: TuneOutcome) -> list[Loser]:
    """Settings that ran and lost, then those that were not worth a run, then those that could not run."""
    best, asked, made = found.best, found.asked, []
    for c in found.order[1:]:
        x, late = ratio(c, best, asked.looked_at), missed(c, asked)
        more = c.num_bytes - best.num_bytes if asked.objective == "memory" else 0
        why = "late" if late else "memory" if more > 0 else "first token" if asked.objective == "ttft" else "slower"
        note = late or (f"{more / 2**20:.1f} MiB more" if more > 0 else "")
        made.append(Loser({"setting": c.label}, why, x.value, x.low, x.high, note))
    ran = {c.label for c in found.order}
    for p in found.prospects:
        if p.label not in ran:
            share = mean(p.promised[b] / best.promised[b] for b in asked.looked_at)
            made.append(Loser({"setting": p.label}, "dominated", share, note="by prediction; it did not run"))
    return made + found.lost


KNOBS: dict[str, Callable[[Setting], str]] = {
    "format": lambda s: s.format,
    "kv format": lambda s: s.kv_format,
    "draft": lambda s: s.draft,
    "draft format": lambda s: s.draft_format,
    "draft vocabulary": lambda s: s.draft_vocabulary,
    "length": lambda s: "goodput" if s.spec.policy == "goodput" else f"k={s.spec.num_draft_tokens}",
    "threads": lambda s: "auto" if s.threads is None else str(s.threads),
}


def reasons(found: TuneOutcome) -> list[tuple[str, str, str]]:
    """For each knob its chosen value, and why: the best setting with another value, measured if it ran."""
    mine, rows = found.best.setting, []
    ran = {c.label: ratio(c, found.best, found.asked.looked_at).value for c in found.order}
    predicted = {p.label: mean(p.promised[b] / found.best.promised[b] for b in p.rounds) for p in found.prospects}
    for knob, of in KNOBS.items():
        rivals = [p.setting for p in found.prospects if of(p.setting) != of(mine)]
        raced, why = [s for s in rivals if s.label in ran], "no other was tried"
        if rivals:
            speed, label = max(((ran if raced else predicted)[s.label], of(s)) for s in raced or rivals)
            why = f"{label}: {speed:.2f} of its speed{'' if raced else ', as predicted'}"
        if knob == "format":
            why += "".join(f"; {x.settings['setting']}: {x.note}" for x in found.lost if x.why == "quality")
        if not (mine.plain and knob in ("draft format", "draft vocabulary", "length")):
            rows.append((knob, of(mine), why))
    if not mine.plain and mine.spec.policy == "fixed":
        most = str(max(found.asked.batches))
        rows.append(("sequences at once", most, "the most of --batch; with a higher --max-num-seqs goodput decides"))
    return rows
