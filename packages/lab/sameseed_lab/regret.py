"""Regret: how far a choice of `tune`, made on half of the prompts, is behind the best setting on the other half.

All settings run on the other half. Many are nearly equal, so the first was lucky: the first few run again, with the
choice and three usual ones, and only these later runs count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from sameseed.plan.candidates import Tell
from sameseed.plan.grid import TuneRequest
from sameseed.plan.race import Contestant, anew, race, ranked, ratio
from sameseed.plan.tune import TuneOutcome, differing
from sameseed.report import record
from sameseed.report.schemas import TUNE_SCHEMA
from sameseed.tuned import TunedFigure

USUAL = 4  # draft tokens of a common default
FINALISTS, REPEATS = 8, 6  # settings among which the best is found, and how often they run again


@dataclass(frozen=True)
class Behind:
    """A setting, and the share of the best one's speed that it lacks, with an 80 % interval."""

    setting: str
    share: TunedFigure


@dataclass(frozen=True)
class PredictionError:
    """Absolute relative error of predicted speed-ups: predicted over measured, less 1."""

    median: float
    p90: float
    worst: float
    coverage: float  # how often the two differ by no more than their 80 % intervals together
    count: int


@dataclass(frozen=True)
class Regret:
    """How far the choice is behind, by `repeats` runs of the finalists."""

    repeats: int
    best: str
    choice: Behind
    baselines: dict[str, Behind]  # "plain", "longest acceptance", and "k = 4" with that draft
    errors: PredictionError
    settings: list[dict[str, Any]]  # label; by batch size, speed-ups (value, low, high) of one run
    differing: list[str]  # settings whose outputs differ from plain decoding's

    def as_record(self, asked: TuneRequest, seconds: float) -> dict[str, Any]:
        """The record of this run, one line of a file of records."""
        names = ("drafts", "formats", "kv_formats", "draft_formats", "batches", "threads", "objective")
        config = {
            "model": record.model_name(asked.model),
            **{name: list(v) if isinstance(v := getattr(asked, name), tuple) else v for name in names},
            "drafts": [" ".join(record.model_name(word) for word in text.split()) for text in asked.drafts],
            "num_prompts": len(asked.prompts) + len(asked.held_out),
            "domains": sorted({p.domain for p in (*asked.prompts, *asked.held_out) if p.domain}),
            "max_tokens": asked.params.max_tokens,
            "temperature": asked.params.temperature,
            "seed": asked.params.seed,
        }
        return {**record.origin(TUNE_SCHEMA), "config": config, "seconds": seconds, **asdict(self)}


def regret(outcome: TuneOutcome, tell: Tell) -> Regret:
    """Run all settings on the prompts held out, then the first of them again with the choice and usual choices."""
    asked = outcome.asked
    held, count = list(outcome.held_out), len(outcome.asked.held_out)
    race(held, asked, count, math.inf, tell, all_run=True)
    chosen = next(c for c in held if c.setting == outcome.best.setting)
    usual = usual_choices(held, asked)
    finals: list[Contestant] = []
    for c in (*ranked(held, asked)[:FINALISTS], chosen, *usual.values()):
        finals += [] if any(c.setting == f.setting for f in finals) else [anew(c)]
    shuffled, rng = list(finals), random.Random(0)
    for _ in range(REPEATS):
        rng.shuffle(shuffled)  # what runs before a setting affects it
        race(shuffled, asked, count, math.inf, tell, all_run=True)
    return compare(held, finals, chosen, usual, asked)


def usual_choices(held: Seq[Contestant], asked: TuneRequest) -> dict[str, Contestant]:
    """The baselines of `Regret`."""
    plain = next(c for c in held if c.plain)
    usual = {"plain": plain}
    fixed = [c for c in held if not c.plain and c.setting.spec.policy == "fixed"]
    if fixed:
        longest = max(fixed, key=lambda c: c.rounds[asked.looked_at[0]].tokens)
        usual["longest acceptance"] = longest
        its = [c for c in fixed if c.setting.group == longest.setting.group]
        usual[f"k = {USUAL}"] = next(c for c in its if c.setting.spec.num_draft_tokens == USUAL)
    return usual


def compare(
    held: Seq[Contestant], finals: Seq[Contestant], chosen: Contestant, usual: dict[str, Contestant], asked: TuneRequest
) -> Regret:
    """The regret of `chosen` and of `usual` choices from the runs of `finals`; errors from those of all, `held`."""
    plain, drafting = next(c for c in held if c.plain), [c for c in held if not c.plain]
    best = ranked(finals, asked)[0]

    def behind(c: Contestant) -> Behind:
        x = ratio(next(f for f in finals if f.setting == c.setting), best, asked.looked_at)
        return Behind(c.label, TunedFigure(1 - x.value, 1 - x.high, 1 - x.low))

    pairs = [[(c.over(plain, b), ratio(c, plain, (b,))) for b in asked.batches] for c in drafting]
    rows = [
        {
            "setting": c.label,
            "predicted": {str(b): asdict(p) for b, (p, _) in zip(asked.batches, its, strict=True)},
            "measured": {str(b): asdict(m) for b, (_, m) in zip(asked.batches, its, strict=True)},
        }
        for c, its in zip(drafting, pairs, strict=True)
    ]
    return Regret(
        REPEATS,
        best.label,
        behind(chosen),
        {name: behind(c) for name, c in usual.items()},
        _errors([x for its in pairs for x in its]),
        rows,
        differing(held),
    )


def _errors(pairs: Seq[tuple[TunedFigure, TunedFigure]]) -> PredictionError:
    if not pairs:
        return PredictionError(0.0, 0.0, 0.0, 0.0, 0)
    off = [abs(p.value / m.value - 1.0) for p, m in pairs]
    inside = sum(_agree(p, m) for p, m in pairs)
    return PredictionError(median(off), float(np.quantile(off, 0.9)), max(off), inside / len(pairs), len(pairs))


def _agree(one: TunedFigure, other: TunedFigure) -> bool:
    """Do the two differ by no more than an 80 % interval of their difference?"""
    low, high = (one, other) if one.value <= other.value else (other, one)
    apart = math.log(high.value / low.value)
    return apart <= math.hypot(math.log(low.high / low.value), math.log(high.value / high.low))
