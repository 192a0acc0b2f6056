"""Bootstrap intervals (Efron, 1979): how far a figure may be off because the questions were these and not others.

Percentile intervals over seeded resamples of the units (questions, or stretches of text, whose tokens are not
independent). Two models on the same units are resampled together (paired), so what both find hard cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np

Interval = tuple[float, float]
RESAMPLES = 2000
LEVEL = 0.95
CHUNK = 1 << 22  # counts in memory at once


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is left out
def ratio_interval(
    parts: Seq[float],
    wholes: Seq[float],
    seed: int,
    transform: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Interval of transform(sum(parts) / sum(wholes)) over resampled units; None for fewer than two units.

    With wholes of 1 it is the mean's; with NLLs over tokens and `transform` exp, perplexity's; with the differences of
    two models' NLLs, their ratio's, paired.
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
    """A value with its interval as a record holds them: None for what is not finite."""
    finite = math.isfinite(value)
    return {"value": value if finite else None, "interval": interval if finite else None}
