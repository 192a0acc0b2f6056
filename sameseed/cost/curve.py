"""Curve: seconds of a pass by its rows and contexts, piecewise linear between measured points; files of such points."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence as Seq
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sameseed.errors import ConfigError

ENGINE_SCHEMA = "sameseed.engine-costs/1"
P10_TO_P90 = 2 * 1.2816  # standard deviations of a normal distribution between its p10 and p90
Floats = NDArray[np.float64]
Number = TypeVar("Number", float, Floats)
SHORT = 64  # cached tokens of a sequence for which a curve's points are measured
LEARN = 0.1  # weight of a new round in the corrections of a curve and in the running means of `EngineCost.ratios`


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object in a file of costs, of our own profile or of another engine. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read costs from {path} ({error}); write them: sameseed profile --json FILE"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object; write it with sameseed profile --json FILE")
    return data


def interpolate(xs: Seq[float], ys: Seq[float], x: float) -> float:
    """Piecewise linear through the points (xs ascending); constant before them, extrapolated by the last two after."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    i = min(bisect_right(xs, x), len(xs) - 1)
    return ys[i - 1] + (x - xs[i - 1]) / (xs[i] - xs[i - 1]) * (ys[i] - ys[i - 1])


class Curve:
    """Seconds of a pass by its number of rows: piecewise linear between measured points, corrected by later rounds.

    The points hold for sequences with `context` cached tokens. Each cached token beyond that adds `per_token` seconds,
    and `per_row` seconds for each row of the sequence that attends to it.
    """

    def __init__(
        self, points: Seq[tuple[float, float]], context: int = SHORT, per_token: float = 0.0, per_row: float = 0.0
    ) -> None:
        """`points`: (rows, seconds), ascending in rows. Seconds are made ascending too: larger passes are no faster."""
        self.rows = [float(r) for r, _ in points]
        self.seconds = list(accumulate((s for _, s in points), max))
        self.context = context
        self.per_token = per_token
        self.per_row = per_row

    def scale(self, factor: float) -> None:
        """Multiply all times by `factor`."""
        self.seconds = [factor * s for s in self.seconds]
        self.per_token *= factor
        self.per_row *= factor

    def at(self, rows: Number) -> Number:
        """Seconds of a pass over `rows` rows, or of several at once; extrapolated from the last two points beyond."""
        xs, ys = self.rows, self.seconds
        if not isinstance(rows, np.ndarray):
            return interpolate(xs, ys, rows)
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if len(xs) > 1 else 0.0
        return np.interp(rows, xs, ys) + slope * np.maximum(rows - xs[-1], 0.0)

    def cost(self, rows: float, batch: float = 1.0, context: float = 0.0) -> float:
        """Seconds of a pass over `rows` rows of `batch` sequences with `context` cached tokens each."""
        return self.at(rows) + self.extra(rows, batch, context)

    def extra(self, rows: float, batch: float, context: float) -> float:
        """The part of `cost` that is due to more cached tokens than those of the points."""
        cached = max(batch * context - self.context, 0.0) * self.per_token
        return cached + rows * max(context - self.context, 0.0) * self.per_row

    def beside(self, batch: float, others: float) -> Curve:
        """The curve of passes that `others` rows of prompts share with `batch` rows and more, the prompts left out.

        Prompts cost the same with or without a draft. But a draft row costs more in the passes that they make long.
        """
        more = [batch, batch + 1.0, *(m - others for m in self.rows if m > batch + 1.0 + others)]
        without = self.at(batch) - self.at(batch + others)
        points = [(m, self.at(m + others) + without) for m in more]
        return Curve(points, self.context, self.per_token, self.per_row)

    def slower(self, rows: float, seconds: float, extra: float = 0.0) -> float:
        """The relative correction of known times after a pass of `seconds`; `extra`: seconds expected for contexts.

        The measured ratio is clamped to 0.5..2 and weighted by `LEARN`, so that one slow round changes little.
        """
        return LEARN * (min(max(seconds / (self.at(rows) + extra), 0.5), 2.0) - 1.0)

    def correct(self, rows: float, seconds: float, extra: float = 0.0) -> None:
        """Correct the curve after a pass over `rows` rows took `seconds`; `extra`: seconds expected for contexts.

        All points move by half of the correction, and the points on both sides of `rows` by up to all of it. Most
        changes are in the time to read memory, which all passes share.
        """
        change = self.slower(rows, seconds, extra)
        moved = change * self.at(rows)
        for j in range(len(self.rows)):
            share = interpolate(self.rows, [float(i == j) for i in range(len(self.rows))], min(rows, self.rows[-1]))
            self.seconds[j] = max(self.seconds[j] + moved * (0.5 + 0.5 * share), 0.5 * self.seconds[j])
        if extra > 0.0:
            self.per_token *= 1.0 + change / 4
            self.per_row *= 1.0 + change / 4
        self.seconds = list(accumulate(self.seconds, max))
