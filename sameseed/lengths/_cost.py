"""What passes cost: seconds of a pass of the target by its rows and contexts, and of a proposal by its steps.

Measured before the first round, and corrected by every later one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SHORT = 64  # cached tokens of a sequence at which a curve's points hold
FADE = 0.97  # of a proposal's cost, a proposal later
UNIT = 1024.0  # cached tokens: the unit in which a proposal's cost grows with them


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

    def _ascend(self) -> None:
        for i in range(1, len(self.seconds)):
            self.seconds[i] = max(self.seconds[i], self.seconds[i - 1])

    def at(self, rows: float) -> float:
        """Seconds of a pass over `rows` rows; beyond the last point it goes on as between the last two."""
        xs, ys = self.rows, self.seconds
        if rows <= xs[0] or len(xs) == 1:
            return ys[0]
        i = min(bisect_right(xs, rows), len(xs) - 1)
        share = (rows - xs[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + share * (ys[i] - ys[i - 1])

    def at_many(self, rows: Floats) -> Floats:
        """`at` of several, ascending."""
        xs, ys = self.rows, self.seconds
        found: Floats = np.interp(rows, xs, ys)
        if len(xs) > 1 and rows[-1] > xs[-1]:
            found = found + (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) * np.maximum(rows - xs[-1], 0.0)
        return found

    def extra(self, contexts: Seq[int], num_rows: Seq[float]) -> float:
        """Seconds that long contexts add: cached tokens and rows of each sequence."""
        if not (self.per_token or self.per_row):
            return 0.0
        beyond = ((max(0, c - self.context), n) for c, n in zip(contexts, num_rows, strict=True))
        return sum(c * (self.per_token + self.per_row * n) for c, n in beyond)

    def correct(self, rows: float, seconds: float, extra: float = 0.0, weight: float = 0.1) -> None:
        """A pass took so long, `extra` of it expected for its contexts.

        The points on both sides of it move, and the rest a little (what slows one pass down mostly slows all).
        """
        ratio = min(max(seconds / (self.at(rows) + extra), 0.5), 2.0)  # one slow round of a busy machine decides little
        i = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1) if len(self.rows) > 1 else 0
        near = {max(i - 1, 0), i}
        for j in range(len(self.seconds)):
            self.seconds[j] *= 1.0 + (weight if j in near else weight / 4) * (ratio - 1.0)
        if extra > 0.0:
            self.per_token *= 1.0 + weight / 4 * (ratio - 1.0)
            self.per_row *= 1.0 + weight / 4 * (ratio - 1.0)
        self._ascend()


class DraftCost:
    """Seconds of a proposal: start + (step + context * mean cached tokens / 1024) * steps, fitted to the latest ones.

    A step is a pass of the drafter's model: of a chain a token, of a tree a level. Least squares that fade, with the
    weight of one proposal on "all of it is steps, and contexts do not matter": what does not vary cannot be told apart.
    """

    def __init__(self, start: float = 0.0, step: float = 0.0, context: float = 0.0, seen: int = 0) -> None:
        self.start = start
        self.step = step
        self.context = context
        self.seen = seen
        # Sums of products of 1, steps and steps * context with one another, and with the seconds.
        self._products = [[0.0] * 3 for _ in range(3)]
        self._seconds = [0.0] * 3

    def at(self, steps: float, context: float = 0.0) -> float:
        """Seconds of drafting `steps` steps, at `context` cached tokens a sequence."""
        return self.start + self.per_step(context) * steps if steps > 0 else 0.0

    def per_step(self, context: float) -> float:
        """Seconds of one step more."""
        return self.step + self.context * context / UNIT

    def correct(self, steps: float, seconds: float, context: float = 0.0) -> None:
        """A proposal of `steps` steps took so long. With none (nothing was found), that was the start."""
        self.seen += steps > 0
        expected = self.start + self.per_step(context) * steps
        if self.seen > 3 and expected > 0.0:  # as for passes: one slow round of a busy machine decides little
            seconds = min(max(seconds, 0.5 * expected), 2.0 * expected)
        features = (1.0, float(steps), steps * context / UNIT)
        for i, f in enumerate(features):
            row = self._products[i]
            row[:] = [FADE * p + f * g for p, g in zip(row, features, strict=True)]
            self._seconds[i] = FADE * self._seconds[i] + f * seconds
        if self.seen < 16 or self.seen % 4 == 0:  # it changes slowly then, and takes longer than all the rest here
            self._fit()

    def _fit(self) -> None:
        """Solve for the three terms, without those that would be below zero."""
        size = self._products[1][1] / max(self._products[0][0], 1e-9)  # mean square of steps: the weight of one
        prior = (1.0, 1e-6, max(size, 1e-6))
        terms = [0, 1, 2]
        while terms:
            table = [
                [self._products[i][j] + (prior[i] if i == j else 0.0) for j in terms] + [self._seconds[i]]
                for i in terms
            ]
            found = dict(zip(terms, _solve(table), strict=True))
            lowest = min(found, key=found.__getitem__)
            if found[lowest] >= 0.0:
                self.start, self.step, self.context = (found.get(i, 0.0) for i in range(3))
                return
            terms.remove(lowest)


def _solve(table: list[list[float]]) -> list[float]:
    """The solution of linear equations whose matrix is positive definite; each row ends with its right-hand side."""
    size = len(table)
    for i in range(size):
        for j in range(i + 1, size):
            share = table[j][i] / table[i][i]
            table[j] = [x - share * y for x, y in zip(table[j], table[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(table[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (table[i][size] - rest) / table[i][i]
    return found


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

    @property
    def plain(self) -> float:
        """Seconds without a draft."""
        return self.target.at(min(self.count, self.rows)) + self.fixed

    def seconds(self, more: float, steps: float) -> float:
        """Seconds with `more` rows, drafted in `steps` steps."""
        added = self.target.at(self.rows + more) - self.target.at(self.rows)
        return self.plain + added + self.slope * more + self.start + self.step * steps

    def seconds_many(self, more: Floats, steps: Floats) -> Floats:
        """`seconds` of several, ascending in rows."""
        added = self.target.at_many(self.rows + more) - self.target.at(self.rows)
        return added + self.slope * more + (self.plain + self.start) + self.step * steps
