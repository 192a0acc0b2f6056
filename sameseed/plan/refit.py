"""Refitting: corrects costs by a few real runs beside plain decoding, before anything is chosen by them.

Costs are measured within a second, of passes over any tokens. Real rounds have other work between passes and colder
caches, and run at another moment of the machine. So a few lengths of each kind of draft run in turns with plain
decoding, on prompts that were replayed: their acceptance is known, and what differs is cost. Three scales are fitted
first. What they leave is treated as a function of the draft size: a tree's passes and their rows do not grow linearly
with it, and a policy that chooses lengths has to find them out first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from sameseed.plan.acceptance import Ints, Replay
from sameseed.plan.candidates import Prospect, TargetBench, Tell, adapted
from sameseed.plan.cost import CostSpread, Floats, Residuals, RoundCost
from sameseed.plan.race import Aim, Contestant, race
from sameseed.plan.rounds import walk
from sameseed.plan.simulate import Interval

PARTS = 3  # parts that a draft adds to a round: rows of the target's pass, draft steps, the gap
PRIOR = 1.0  # prior standard deviation of each part's scale
NOISE, SURE = 0.03, 4  # prior noise of a run's ratio to plain decoding, and runs that this prior counts for
SCALES = (0.1, 10.0)
PROBES = 4  # most runs of each draft


@dataclass(frozen=True)
class Probe:
    """A real run with drafts: sizes by running sequences, and seconds over plain decoding's on the same texts."""

    lengths: tuple[int, ...]
    batch: int
    ratio: float


def refitted(target: TargetBench, found: Seq[Prospect], seconds: float, tell: Tell) -> list[Prospect]:
    """The same settings, predicted again by costs that real runs have corrected; unchanged where there is no time.

    `seconds`: to spend at most. The prediction for plain decoding is corrected too.
    """
    made: list[Prospect] = []
    for plain in (p for p in found if p.candidate.plain):
        own = [p for p in found if p.candidate.target == plain.candidate.target]
        share = seconds / sum(p.candidate.plain for p in found)
        made += _one(target, plain, own, share, tell)
    return made


def _one(target: TargetBench, plain: Prospect, own: list[Prospect], seconds: float, tell: Tell) -> list[Prospect]:
    """Refit the settings that share one plain decoding."""
    batches, ways = target.asked.batches, list(dict.fromkeys(p.candidate.way for p in own if p is not plain))
    for most in (PROBES, 2):  # where time is short, two runs of each draft must do
        probes = [p for way in ways for p in _probes([q for q in own if q.candidate.way == way])[:most]]
        count = _affordable(target, [plain, *probes], seconds)
        if count:
            break
    if not probes or not count:
        return own
    jobs = lambda batch, members: [target.jobs[target.replayed[i]] for i in members]  # noqa: E731
    runs = [Contestant(p, lambda p=p: target.engine(p.candidate), jobs) for p in (plain, *probes)]  # type: ignore[misc]
    for run in runs:  # warm-up of caches, pages and threads
        replace(run, tokens={}, seconds={}, ttft={}, itl={}, texts={}).run(1, range(1))
    race(runs, count, batches, math.inf, Aim(batches), tell, all_run=True)
    for batch in batches:
        x = sum(runs[0].tokens[batch]) / sum(runs[0].seconds[batch]) / plain.tokens_per_s[batch].value
        was = plain.tokens_per_s[batch]
        plain.tokens_per_s[batch] = Interval(x * was.value, x * was.low, x * was.high)
    made = [plain]
    for way in ways:
        ran = [
            (run.prospect.candidate.spec, b, sum(run.seconds[b]) / sum(runs[0].seconds[b]))
            for run in runs
            for b in batches
            if run.prospect.candidate.way == way
        ]
        whole, threads = target.replays[way], plain.candidate.threads
        replay = whole.subset(range(count))
        fixed = [Probe((s.num_draft_tokens,) * b, b, x) for s, b, x in ran if s.policy == "fixed"]
        cost = refit(replay, target.costs[way, threads], fixed)
        chosen = [Probe(adapted(whole, cost, s.num_draft_tokens, b), b, x) for s, b, x in ran if s.policy != "fixed"]
        cost = replace(cost, residuals=Residuals((*cost.residuals.runs, *left_of(replay, cost, chosen, adapts=True))))
        made += target.promised(way, cost, plain, threads)
    known = {p.candidate.label: p.num_bytes for p in own}
    for p in made:
        p.num_bytes = known[p.candidate.label]
    return made


def _probes(own: Seq[Prospect]) -> list[Prospect]:
    """The most informative settings first: a middle length, the longest, those that adapt, a single token."""
    fixed = [p for p in own if p.candidate.spec.policy == "fixed"]
    some = [fixed[len(fixed) // 2], fixed[-1]] if len(fixed) > 1 else fixed
    return [*some, *(p for p in own if p not in fixed), *(p for p in fixed[:1] if p not in some)]


def _affordable(target: TargetBench, runs: Seq[Prospect], seconds: float) -> int:
    """Number of prompts on which all of them run in `seconds`; 0 if a batch of the largest size takes longer."""
    most, least = len(target.replayed), max(target.asked.batches)
    each = sum(target.mean_tokens / p.tokens_per_s[b].value for p in runs for b in target.asked.batches)
    count = min(most, int(seconds / each)) if math.isfinite(seconds) else most
    return count if count >= min(least, most) else 0


def refit(replay: Replay, cost: RoundCost, probes: Seq[Probe]) -> RoundCost:
    """Costs with which simulated runs over these texts take, relative to plain decoding, what the real runs took.

    Ridge regression towards 1 fits three scales: of drafted rows, of the draft's steps, and of a drafted round's gap.
    What the probes do not tell stays as measured. `residuals` hold what remains of each probe, as far as it is more
    than noise; `spread.drafted` says how far off the probes were without them.
    """
    none = replace(cost, rows_scale=0.0, draft_scale=0.0, drafted_gap=0.0)
    parts = (
        replace(none, rows_scale=cost.rows_scale),
        replace(none, draft_scale=cost.draft_scale),
        replace(none, drafted_gap=cost.drafted_gap),
    )
    rows, wanted = [], []
    for probe in probes:
        plain = _seconds(replay, cost, (0,) * probe.batch, probe.batch)
        without = _seconds(replay, none, probe.lengths, probe.batch)
        took = probe.ratio * plain
        rows.append([(_seconds(replay, part, probe.lengths, probe.batch) - without) / took for part in parts])
        wanted.append(1.0 - without / took)
    found, off = ridge(np.array(rows), np.array(wanted))
    scales = np.clip(found, *SCALES).tolist()
    fitted = replace(
        cost,
        rows_scale=cost.rows_scale * scales[0],
        draft_scale=cost.draft_scale * scales[1],
        drafted_gap=cost.drafted_gap * scales[2],
        spread=CostSpread(drafted=off),
    )
    return replace(fitted, residuals=Residuals(left_of(replay, fitted, probes)))


def left_of(
    replay: Replay, cost: RoundCost, probes: Seq[Probe], adapts: bool = False
) -> tuple[tuple[int, int, float], ...]:
    """(batch, draft tokens, log of measured over predicted seconds) of each probe, less what noise explains.

    `adapts`: a policy chose their lengths, and draft tokens are 0.
    """
    logs = []
    for p in probes:
        said = _seconds(replay, cost, p.lengths, p.batch) / _seconds(replay, cost, (0,) * p.batch, p.batch)
        logs.append(math.log(p.ratio / said))
    square = sum(x * x for x in logs) / max(1, len(logs))
    real = square / (square + NOISE**2)
    return tuple((p.batch, 0 if adapts else p.lengths[-1], real * x) for p, x in zip(probes, logs, strict=True))


def ridge(rows: Floats, wanted: Floats) -> tuple[Floats, float]:
    """Scales [PARTS] near 1 with which `rows` [n, PARTS] give `wanted` [n], and the error that remains."""
    a = np.vstack([rows / NOISE, np.eye(PARTS) / PRIOR])
    b = np.append(wanted / NOISE, np.ones(PARTS) / PRIOR)
    found = np.linalg.lstsq(a, b, rcond=None)[0].astype(np.float64)
    left = float(np.square(rows @ found - wanted).sum())
    return found, math.sqrt((SURE * NOISE**2 + left) / (SURE + len(wanted)))


def _seconds(replay: Replay, cost: RoundCost, lengths: Seq[int], batch: int) -> float:
    order: Ints = np.arange(replay.num_texts)[None]
    t = walk(replay, cost, lengths, order, batch, refill=False)
    return float((t.target + t.draft + t.gap + t.prefill)[0])
