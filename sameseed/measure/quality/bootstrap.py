"""Bootstrap intervals (Efron, 1979): the uncertainty of a value due to the choice of questions or text.

Percentile intervals over seeded resamples of units. A unit is a question or a stretch of text, because its tokens are
not independent. Two models on the same units are resampled together (paired), so the difficulty of units cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np

Interval = tuple[float, float]
RESAMPLES = 2000
LEVEL = 0.95
CHUNK = 1 << 22  # most resampling counts in memory at once


@np.errstate(over="ignore", invalid="ignore")  # values that are not finite are left out
def ratio_interval(
    parts: Seq[float],
    wholes: Seq[float],
    seed: int,
    transform: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Interval of transform(sum(parts) / sum(wholes)) over resampled units; None for fewer than two units.

    With `wholes` of 1: the mean. With NLLs, token counts and `transform` exp: perplexity. With differences of two
    models' NLLs instead: the paired ratio of their perplexities.
    """
    top, bottom = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    n = len(top)
    if n < 2:
        return None
    generator = np.random.default_rng(seed)
    step = max(1, CHUNK // n)
    found = []
    for start in range(0, resamples, step):
        counts = generator.multinomial(n, np.full(n, 1.0 / n), size=min(step, resamples - start))
        below = counts @ bottom
        found.append(np.divide(counts @ top, below, out=np.full(len(below), np.nan), where=below > 0))
    values = transform(np.concatenate(found))
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean_interval(values: Seq[float], seed: int) -> Interval | None:
    """Interval of the mean of independent values: a task's scores, or the differences of two models' scores."""
    return ratio_interval(values, [1.0] * len(values), seed)


def estimate(value: float, interval: Interval | None) -> dict[str, Any]:
    """A value with its interval as plain data for a record. Both are None if the value is not finite."""
    finite = math.isfinite(value)
    return {"value": value if finite else None, "interval": interval if finite else None}
