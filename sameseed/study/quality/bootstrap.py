"""Bootstrap intervals (Efron, 1979): how far a figure may be off because the questions were these and not others.

Percentile intervals over seeded resamples of the units (questions, or stretches of text, whose tokens are not
independent). Two models on the same units are resampled together (paired), so what both find hard cancels out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

import numpy as np

Interval = tuple[float, float]
RESAMPLES = 2000
LEVEL = 0.95
CHUNK = 1 << 22  # counts in memory at once


def ratio_interval(
    parts: Seq[float],
    wholes: Seq[float],
    seed: int,
    transform: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """Interval of transform(sum(parts) / sum(wholes)) over resampled units; (nan, nan) for fewer than two units.

    With wholes of 1 it is the mean's; with NLLs over tokens and `transform` exp, perplexity's; with the differences of
    two models' NLLs, their ratio's, paired.
    """
    top, bottom = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    n = len(top)
    if n < 2:
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    step = max(1, CHUNK // n)
    found = []
    for start in range(0, resamples, step):
        counts = generator.multinomial(n, np.full(n, 1.0 / n), size=min(step, resamples - start))
        below = counts @ bottom
        found.append(np.divide(counts @ top, below, out=np.full(len(below), np.nan), where=below > 0))
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is left out below
        values = transform(np.concatenate(found))
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_interval(values: Seq[float], seed: int) -> Interval:
    """Interval of the mean of independent values, such as a task's scores."""
    return ratio_interval(values, [1.0] * len(values), seed)


def paired_interval(mine: Seq[float], its: Seq[float], seed: int) -> Interval:
    """Interval of the difference of two means over the same units, the first less the second."""
    return mean_interval([a - b for a, b in zip(mine, its, strict=True)], seed)
