"""Costs of a round: the target's pass, the drafter's steps, and the gap (all time outside the models).

`CostModel` is the interface that a simulation needs; `RoundCost` implements it with measured curves. All methods are
vectorised: one number for each of G batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sameseed.cost.curve import Curve
from sameseed.cost.running import UNIT, DraftCost, EngineCost
from sameseed.study.costs import Profile

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
P10_TO_P90 = 2 * 1.2816  # standard deviations of a normal distribution between its p10 and p90


@dataclass(frozen=True)
class CostSpread:
    """Uncertainty of the costs: standard deviations of the logarithms of each part's seconds; 0: taken as exact.

    `drafted`: of the total seconds of a run with drafts, relative to plain decoding.
    """

    target: float = 0.0
    draft: float = 0.0
    gap: float = 0.0
    drafted: float = 0.0


@dataclass(frozen=True)
class Residuals:
    """Measured over predicted seconds of real runs with drafts, beyond what the parts of a round explain.

    `runs`: (batch size, draft tokens, logarithm of the ratio); 0 tokens: a policy chose the lengths.
    """

    runs: tuple[tuple[int, int, float], ...] = ()

    def at(self, batch: int, tokens: int) -> float:
        """The ratio at the nearest batch size, interpolated along the logarithm of the draft size; 1 without runs."""
        own = sorted((b, k, off) for b, k, off in self.runs if (k == 0) == (tokens == 0))
        near = min((b for b, _, _ in own), key=lambda b: abs(math.log(b / batch)), default=0)
        sizes = [math.log(max(k, 1)) for b, k, _ in own if b == near]
        logs = [off for b, _, off in own if b == near]
        return math.exp(np.interp(math.log(max(tokens, 1)), sizes, logs)) if logs else 1.0


class CostModel(Protocol):
    """Seconds of the parts of a round; arrays [G] in, arrays [G] out. `context`: mean cached tokens of a sequence."""

    def target(self, rows: Floats, batch: Floats, context: Floats) -> Floats:
        """A pass of the target over `rows` rows of `batch` sequences."""

    def draft(self, level: int, steps: Floats, batch: Floats, context: Floats) -> Floats:
        """`steps` steps of a draft level for `batch` sequences."""

    def gap(self, batch: Floats, drafted: Bools) -> Floats:
        """Seconds outside the models in a round, with a draft or without."""

    def prefill(self, tokens: Floats, drafted: bool) -> Floats:
        """Prefill of `tokens` prompt tokens in all: by the target and, where drafts will follow, by the drafter."""

    @property
    def spread(self) -> CostSpread:
        """Uncertainty of the costs."""


@dataclass(frozen=True)
class LevelCost:
    """Seconds of one level's proposal: `start`, and for each step `step` by its rows (`width` for every sequence).

    `context`: seconds more for each step and 1024 cached tokens. `reads`: does the level run a model over the prompt?
    """

    start: float = 0.0
    step: Curve = field(default_factory=lambda: Curve([(1, 0.0)]))
    width: int = 1
    context: float = 0.0
    reads: bool = True

    @classmethod
    def of(cls, cost: DraftCost) -> LevelCost:
        """The cost fitted to the proposals of a running engine."""
        points = [(size, cost.terms(size)[1]) for size in (1, 64)]
        return cls(cost.terms(1)[0], Curve(points, 0, float(cost.coefficients[4]) / UNIT), 1, 0.0, False)

    def at(self, steps: Floats, batch: Floats, context: Floats) -> Floats:
        """Seconds of `steps` steps for a batch."""
        each = self.step.at_many(batch * self.width) + self.context * context / UNIT
        beyond = np.maximum(batch * context - self.step.context, 0.0) * self.step.per_token
        return self.start + steps * (each + beyond)


@dataclass(frozen=True)
class RoundCost:
    """Costs from measured curves. `levels`: draft levels, the lowest first; a single one serves all levels.

    `plain_gap` and `drafted_gap`: seconds outside the models in a round, plus `gap_per_seq` for each of its sequences.
    `prompt`: passes over prompts, where these were measured. `max_num_rows`: rows of one pass. `rows_scale` corrects
    the time that drafted rows add to a pass, `draft_scale` that of the draft's steps. `residuals`: what the parts
    together leave unexplained (`refit.py`).
    """

    curve: Curve
    levels: tuple[LevelCost, ...] = (LevelCost(),)
    plain_gap: float = 0.0
    drafted_gap: float = 0.0
    gap_per_seq: float = 0.0
    prompt: Curve | None = None
    max_num_rows: int = 512
    rows_scale: float = 1.0
    draft_scale: float = 1.0
    spread: CostSpread = CostSpread()
    residuals: Residuals = Residuals()

    @classmethod
    def of(cls, cost: EngineCost) -> RoundCost:
        """From the measured costs of a running engine (`engine.calibrate.measure_rounds`)."""
        (plain, row), (drafted, _) = cost.gap.terms(False), cost.gap.terms(True)
        return cls(cost.target, (LevelCost.of(cost.draft),), plain, drafted, row)

    @classmethod
    def from_profile(cls, profile: Profile, format: str) -> RoundCost:
        """From what `sameseed profile` measured of a shape. Raises ConfigError for a format that was not profiled."""
        prompts = sorted((p.tokens, p.ms / 1e3) for p in profile.prefill if p.format == format)
        return cls(
            curve_of(profile, format),
            prompt=Curve([(0, 0.0), *prompts]) if prompts else None,
            spread=CostSpread(_spread_of(profile, format)),
        )

    def target(self, rows: Floats, batch: Floats, context: Floats) -> Floats:
        c = self.curve
        cached = np.maximum(batch * context - c.context, 0.0) * c.per_token
        plain = c.at_many(batch) + batch * np.maximum(context - c.context, 0.0) * c.per_row
        seconds = c.at_many(rows) + rows * np.maximum(context - c.context, 0.0) * c.per_row
        return plain + self.rows_scale * (seconds - plain) + cached

    def draft(self, level: int, steps: Floats, batch: Floats, context: Floats) -> Floats:
        return self.draft_scale * self.levels[min(level, len(self.levels) - 1)].at(steps, batch, context)

    def gap(self, batch: Floats, drafted: Bools) -> Floats:
        return np.where(drafted, self.drafted_gap, self.plain_gap) + self.gap_per_seq * batch

    def prefill(self, tokens: Floats, drafted: bool) -> Floats:
        read = [level.step for level in self.levels if drafted and level.reads]
        whole, rest = np.divmod(tokens, self.max_num_rows)
        found: Floats = np.zeros_like(tokens)
        for curve, scale in ((self.prompt or self.curve, 1.0), *((c, self.draft_scale) for c in read)):
            seconds = whole * curve.at_many(np.float64(self.max_num_rows)) + (rest > 0) * curve.at_many(rest)
            found += scale * seconds
        return found


def curve_of(profile: Profile, format: str) -> Curve:
    """Seconds of passes by rows at the shortest measured context; the longest gives the cost of cached tokens.

    Raises ConfigError for a format that was not measured.
    """
    contexts = profile.contexts(format)
    base, long = contexts[0], contexts[-1]
    rows = sorted({x.rows for x in profile.costs if x.format == format and x.context == base})
    points = [(m, profile.ms(format, m, base) / 1e3) for m in rows]
    if long == base:
        return Curve(points, base)
    few, many = rows[0], rows[-1]
    slow = [(profile.ms(format, m, long) - profile.ms(format, m, base)) / 1e3 / (long - base) for m in (few, many)]
    per_row = max(0.0, (slow[1] - slow[0]) / (many - few)) if many > few else 0.0
    return Curve(points, base, max(0.0, slow[0] - few * per_row), per_row)


def _spread_of(profile: Profile, format: str) -> float:
    """Spread of the seconds of passes, from their p10 and p90."""
    spreads = [math.log(x.p90 / x.p10) for x in profile.costs if x.format == format and 0 < x.p10 <= x.p90]
    return median(spreads) / P10_TO_P90 if spreads else 0.0
