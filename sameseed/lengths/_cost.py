"""What a round costs: a pass of the target by its rows and contexts, a proposal by its steps, and what lies outside.

Measured before the first round, and corrected by every later one: a machine's bandwidth may change twofold in an hour.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sameseed.spec.drafter import Round

Floats = NDArray[np.float64]
SHORT = 64  # cached tokens of a sequence at which a curve's points hold
FADE = 0.97  # of an observation, one later
LEARN = 0.1  # weight of a round in what rounds like it take over what was expected
FEW_TOKENS, CATCH_UP = 16, 0.5  # of fewer tokens a drafter that catches up tells nothing; weight of what it took
MICROSECOND = 1e-6
UNIT = 1024.0  # cached tokens: the unit in which a proposal's cost grows with them


def interpolate(xs: Seq[float], ys: Seq[float], x: float) -> float:
    """Linear in x between the points (xs ascending), along the last two beyond them, constant before."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    i = min(bisect_right(xs, x), len(xs) - 1)
    return ys[i - 1] + (x - xs[i - 1]) / (xs[i] - xs[i - 1]) * (ys[i] - ys[i - 1])


class Curve:
    """Seconds of a pass by its rows: straight lines between measured points, which later rounds correct.

    The points hold for sequences of `context` cached tokens. Each token beyond that costs its sequence `per_token`
    seconds, and `per_row` more for every row of the sequence that attends to it.
    """

    def __init__(
        self, points: Seq[tuple[int, float]], context: int = SHORT, per_token: float = 0.0, per_row: float = 0.0
    ) -> None:
        """`points`: (rows, seconds), ascending in rows; made to ascend in seconds: a larger pass is no faster."""
        self.rows = [float(r) for r, _ in points]
        self.seconds = [s for _, s in points]
        self.context = context
        self.per_token = per_token
        self.per_row = per_row
        self._ascend()

    def scale(self, factor: float) -> None:
        """Every pass takes `factor` times as long."""
        self.seconds = [factor * s for s in self.seconds]
        self.per_token *= factor
        self.per_row *= factor

    def _ascend(self) -> None:
        for i in range(1, len(self.seconds)):
            self.seconds[i] = max(self.seconds[i], self.seconds[i - 1])

    def at(self, rows: float) -> float:
        """Seconds of a pass over `rows` rows; beyond the last point it goes on as between the last two."""
        return interpolate(self.rows, self.seconds, rows)

    def at_many(self, rows: Floats | np.float64) -> Floats:
        """`at` of several, in any order."""
        xs, ys = self.rows, self.seconds
        found: Floats = np.asarray(np.interp(rows, xs, ys))
        if len(xs) > 1:
            found = found + (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) * np.maximum(rows - xs[-1], 0.0)
        return found

    def extra(self, contexts: Seq[int], num_rows: Seq[float]) -> float:
        """Seconds that long contexts add: cached tokens and rows of each sequence."""
        if not (self.per_token or self.per_row):
            return 0.0
        beyond = ((max(0, c - self.context), n) for c, n in zip(contexts, num_rows, strict=True))
        return sum(c * (self.per_token + self.per_row * n) for c, n in beyond)

    def slower(self, rows: float, seconds: float, extra: float = 0.0) -> float:
        """By which share to correct what is known, after a pass that took so long, `extra` of it expected for contexts.

        One slow round of a busy machine decides little.
        """
        return LEARN * (min(max(seconds / (self.at(rows) + extra), 0.5), 2.0) - 1.0)

    def correct(self, rows: float, seconds: float, extra: float = 0.0) -> None:
        """A pass took so long, `extra` of it expected for its contexts.

        The points on both sides of it move by that, the others by half: most of what changes is the time to read.
        """
        change = self.slower(rows, seconds, extra)
        moved = change * self.at(rows)
        for j, share in enumerate(self._shares(rows)):
            self.seconds[j] = max(self.seconds[j] + moved * (0.5 + 0.5 * share), 0.5 * self.seconds[j])
        if extra > 0.0:
            self.per_token *= 1.0 + change / 4
            self.per_row *= 1.0 + change / 4
        self._ascend()

    def _shares(self, rows: float) -> list[float]:
        """How much each point counts at `rows`."""
        if len(self.rows) == 1:
            return [1.0]
        i = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        upper = min(max((rows - self.rows[i - 1]) / (self.rows[i] - self.rows[i - 1]), 0.0), 1.0)
        return [1.0 - upper if j == i - 1 else upper if j == i else 0.0 for j in range(len(self.rows))]


class FadingFit:
    """Least squares whose older observations fade: seconds as a sum of features times coefficients, none below zero.

    What does not vary cannot be told apart: `ridges`, each in units of its feature's mean square, say which feature
    explains it then (that of the smallest).
    """

    def __init__(self, ridges: Seq[float]) -> None:
        size = len(ridges)
        self.seen = 0
        self.coefficients = np.zeros(size)
        self._ridges = np.array(ridges)
        self._products = np.zeros((size, size))  # of features with one another, summed
        self._seconds = np.zeros(size)  # of features with the seconds

    def at(self, features: Seq[float]) -> float:
        """Seconds that these features stand for."""
        return float(self.coefficients @ features)

    def correct(self, features: Seq[float], seconds: float) -> None:
        """An observation; one far from what was expected counts as at most twice, or half, of it."""
        self.seen += 1
        expected = self.at(features)
        if self.seen > 6 and expected > 0.0:  # one slow round of a busy machine decides little
            seconds = min(max(seconds, 0.5 * expected), 2.0 * expected)
        row = np.asarray(features)
        self._products = FADE * self._products + np.outer(row, row)
        self._seconds = FADE * self._seconds + row * seconds
        if self.seen < 16 or self.seen % 8 == 0:  # it changes slowly then, and takes longer than all the rest here
            self._solve()

    def scale(self, factor: float) -> None:
        """Everything takes `factor` times as long."""
        self.coefficients *= factor
        self._seconds *= factor

    def as_array(self) -> Floats:
        """All of it, flat."""
        return np.concatenate([[self.seen], self.coefficients, self._seconds, self._products.ravel()])

    def restore(self, array: Floats) -> None:
        """Go on from `as_array`'s. Raises ValueError for another number of features."""
        size = len(self.coefficients)
        if array.shape != (1 + 2 * size + size**2,) or not np.isfinite(array).all():
            raise ValueError(f"{array.shape} numbers, for {size} features")
        self.seen = int(array[0])
        self.coefficients, self._seconds = array[1 : 1 + size].copy(), array[1 + size : 1 + 2 * size].copy()
        self._products = array[1 + 2 * size :].reshape(size, size).copy()

    def _solve(self) -> None:
        table = self._products + np.diag(self._ridges * self._products.diagonal() / max(self._products[0, 0], 1e-9))
        terms = self._products.diagonal() > 0.0
        self.coefficients = np.zeros(len(terms))
        while terms.any():
            found = np.linalg.solve(table[np.ix_(terms, terms)], self._seconds[terms])
            if found.min() >= 0.0:
                self.coefficients[terms] = found
                return
            terms[np.flatnonzero(terms)[found.argmin()]] = False


class DraftCost(FadingFit):
    """Seconds of a proposal for B sequences by its steps: passes of the drafter's model, of a tree its levels.

    (start + per sequence * B) + (step + B * (per sequence + per 1024 cached tokens * context / 1024)) * steps.
    Where lengths hardly vary, a proposal's time is its steps'; of a drafter that guesses all `at_once`, its start's.
    """

    def __init__(self, at_once: bool = False) -> None:
        super().__init__((1e-6, 0.1, 1.0, 1.0, 1.0) if at_once else (1.0, 1.0, 1e-6, 0.1, 1.0))
        self.at_once = at_once

    def terms(self, num_seqs: float, context: float = 0.0) -> tuple[float, float]:
        """Seconds before the first step, and of each step; `context`: mean cached tokens of a sequence."""
        start, start_seq, step, step_seq, token = self.coefficients.tolist()
        return start + start_seq * num_seqs, step + num_seqs * (step_seq + token * context / UNIT)

    def learn(self, steps: float, num_seqs: float, context: float, seconds: float) -> None:
        """A proposal took so long. With no steps nothing was found: that was the start."""
        self.correct((1.0, num_seqs, steps, steps * num_seqs, steps * num_seqs * context / UNIT), seconds)


class GapCost:
    """Seconds outside the models (Python, scheduling) by the rows of a round: a base, and more for each row.

    Rounds without a draft and those with one are told apart: while one kind is seldom seen, what it takes stays known.
    """

    def __init__(self) -> None:
        self.plain, self.drafted = (FadingFit((1e-6, 0.1)) for _ in range(2))

    @property
    def seen(self) -> int:
        return self.plain.seen + self.drafted.seen

    def terms(self, drafted: bool) -> tuple[float, float]:
        """Seconds of a round, and of each of its rows; a kind not seen is taken to be as the other."""
        fit, other = (self.drafted, self.plain) if drafted else (self.plain, self.drafted)
        base, row = (fit if fit.seen else other).coefficients.tolist()
        return base, row

    def at(self, rows: float, drafted: bool) -> float:
        base, row = self.terms(drafted)
        return base + row * rows

    def correct(self, rows: float, drafted: bool, seconds: float) -> None:
        """A round took so long there."""
        (self.drafted if drafted else self.plain).correct((1.0, rows), seconds)


@dataclass
class EngineCost:
    """Seconds of whole rounds: passes of the target, proposals, and the gap between passes (Python, scheduling).

    `ratios`: by kind of round and size of the batch, what rounds took over what was expected.
    """

    target: Curve
    draft: DraftCost = field(default_factory=DraftCost)
    gap: GapCost = field(default_factory=GapCost)
    catch_up: float = 0.0  # seconds for each token that the drafter has yet to see when it is asked
    ratios: dict[tuple[bool, int], float] = field(default_factory=dict)

    def as_arrays(self) -> dict[str, Floats]:
        """All of it, to be kept."""
        target = self.target
        return {
            "target": np.array([target.rows, target.seconds]),
            "contexts": np.array([target.context, target.per_token, target.per_row]),
            "catch_up": np.array([self.catch_up]),
            "draft": self.draft.as_array(),
            "at_once": np.array([float(self.draft.at_once)]),
            "plain_gap": self.gap.plain.as_array(),
            "drafted_gap": self.gap.drafted.as_array(),
            "ratios": np.array([(*key, ratio) for key, ratio in self.ratios.items()], dtype=float).reshape(-1, 3),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Floats]) -> EngineCost:
        """What `as_arrays` gave. Raises KeyError or ValueError for anything else."""
        rows, seconds = arrays["target"].tolist()
        context, per_token, per_row = arrays["contexts"].tolist()
        curve = Curve(list(zip(rows, seconds, strict=True)), int(context), per_token, per_row)
        cost = cls(curve, DraftCost(bool(arrays["at_once"][0])))
        cost.draft.restore(arrays["draft"])
        cost.gap.plain.restore(arrays["plain_gap"])
        cost.gap.drafted.restore(arrays["drafted_gap"])
        cost.catch_up = float(arrays["catch_up"][0])
        cost.ratios = {(bool(drafted), int(size)): ratio for drafted, size, ratio in arrays["ratios"].tolist()}
        return cost

    def scale(self, factor: float) -> None:
        """The models' passes take `factor` times as long as they did; what lies between them does not."""
        self.target.scale(factor)
        self.draft.scale(factor)
        self.catch_up *= factor

    def learn_catch_up(self, num_tokens: int, seconds: float) -> None:
        """A drafter took so long for tokens that it had yet to see, beyond what the proposals took."""
        if num_tokens >= FEW_TOKENS:
            found = min(max(seconds, 0.0) / num_tokens, 2.0 * self.catch_up + MICROSECOND)
            self.catch_up += CATCH_UP * (found - self.catch_up)

    def ratio(self, drafted: bool, num_seqs: int) -> float:
        """What such rounds take over what their parts say; a size not seen is taken to be as the nearest one."""
        size = num_seqs.bit_length()
        near = min((key for key in self.ratios if key[0] == drafted), key=lambda key: abs(key[1] - size), default=None)
        return 1.0 if near is None else self.ratios[near]

    def prices(
        self, contexts: Seq[int], num_rows: int, num_drafting: int, drafting_context: float, ratios: bool = True
    ) -> Prices:
        """Of a pass over `num_rows` known rows of sequences with these contexts, `num_drafting` drafted for."""
        count = len(contexts)
        start, step = self.draft.terms(num_drafting, drafting_context)
        plain, (_, row) = self.gap.at(count, False), self.gap.terms(True)
        start += max(0.0, self.gap.at(count, True) - plain)
        slope = row + self.target.per_row * max(0.0, drafting_context - self.target.context)
        fixed = self.target.extra(contexts, [1] * count) + plain
        both = (self.ratio(False, count), self.ratio(True, count)) if ratios else (1.0, 1.0)
        return Prices(self.target, count, num_rows, fixed, slope, start, step, *both)

    def learn(self, round_: Round, steps: float, catching_up: bool, start: bool = False, weight: float = LEARN) -> None:
        """A round took so long; `steps`: expected of its proposal. One that catches up tells nothing of later ones.

        At the `start` a change is that of the whole machine: all that models do takes as much longer or shorter.
        `weight`: of the round in what rounds like it take over what was expected.
        """
        times, num_seqs, num_nodes = round_.times, len(round_.seqs), sum(round_.num_draft)
        assert times is not None
        contexts = [len(seq) for seq in round_.seqs]
        asking = [n for n, k in zip(contexts, round_.num_asked, strict=True) if k]
        drafted, context = bool(asking), sum(asking) / max(1, len(asking))
        prompts = round_.num_rows > num_seqs + num_nodes
        if not (prompts or catching_up):
            prices = self.prices(contexts, num_seqs, len(asking), context, ratios=False)
            expected = prices.seconds(num_nodes, steps) if drafted else prices.plain
            took = times.draft + times.target + times.verify + times.schedule
            key = (drafted, num_seqs.bit_length())
            known = self.ratios.get(key, 1.0)
            self.ratios[key] = known + weight * (min(max(took / expected, 0.8 * known), 1.25 * known) - known)
        if drafted and not catching_up:
            self.draft.learn(steps, len(asking), context, times.draft)
        self.gap.correct(num_seqs + num_nodes, drafted, times.verify + times.schedule)
        if round_.num_rows <= 2 * self.target.rows[-1]:
            extra = self.target.extra(contexts, [1 + n for n in round_.num_draft])
            if start:
                self.scale(1.0 + self.target.slower(round_.num_rows, times.target, extra))
            else:
                self.target.correct(round_.num_rows, times.target, extra)


@dataclass(frozen=True)
class Prices:
    """What deciding `count` tokens and a draft's costs, in a pass of `rows` known rows.

    Rows of prompts in the pass cost what they cost, with a draft or without: only what a draft adds beyond them counts,
    beside what the `count` rows would take by themselves. Else drafts would look cheap where prompts make a pass long,
    dearer though they are there than in the next pass.
    """

    target: Curve
    count: int
    rows: int
    fixed: float  # for contexts, and outside the models
    slope: float  # a row more, because of what is cached
    start: float  # a proposal
    step: float  # a step of it
    plain_ratio: float = 1.0  # what rounds without a draft took over what was expected, and those with one
    draft_ratio: float = 1.0

    @property
    def plain(self) -> float:
        """Seconds without a draft."""
        return self._without * self.plain_ratio

    @property
    def _without(self) -> float:
        return self.target.at(min(self.count, self.rows)) + self.fixed

    def seconds(self, more: float, steps: float) -> float:
        """Seconds with `more` rows, drafted in `steps` steps."""
        added = self.target.at(self.rows + more) - self.target.at(self.rows)
        return (self._without + added + self.slope * more + self.start + self.step * steps) * self.draft_ratio

    def seconds_many(self, more: Floats, steps: Floats) -> Floats:
        """`seconds` of several, ascending in rows."""
        added = self.target.at_many(self.rows + more) - self.target.at(self.rows)
        return (added + self.slope * more + (self._without + self.start) + self.step * steps) * self.draft_ratio
