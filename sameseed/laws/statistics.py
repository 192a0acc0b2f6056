"""Goodness-of-fit tests against an exact distribution; a correct engine fails one with probability about 1e-9."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

ALPHA = 1e-9  # significance level: a p-value below this is no accident
LEAST_EXPECTED = 10.0  # expected draws in a cell of a G-test; cells with fewer are pooled

Cell = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """How draws fit a distribution: G-test p-value, total variation and its limit, and impossible draws."""

    p_value: float
    variation: float
    variation_limit: float
    impossible: int

    @property
    def good(self) -> bool:
        return self.p_value > ALPHA and self.variation < self.variation_limit and not self.impossible


def target_law(counts: Mapping[Cell, int], law: Mapping[Cell, float]) -> Fit:
    """Law 2: compare draws with the distribution that they should follow; cells not in `law` are impossible.

    The limit of the total variation is 1.25 times its expectation, or, for few cells, what McDiarmid's inequality
    allows with probability ALPHA.
    """
    total = sum(counts.values())
    cells = list(law)
    p = np.array([law[c] for c in cells])
    n = np.array([counts.get(c, 0) for c in cells], np.float64)
    impossible = total - int(n.sum()) + int(n[p == 0.0].sum())
    expected = float(np.sqrt(2 * p * (1 - p) / (math.pi * total)).sum() / 2)
    limit = max(1.25 * expected, expected + math.sqrt(math.log(1 / ALPHA) / (2 * total)))
    variation = float(np.abs(n / total - p).sum() / 2) + impossible / total / 2
    return Fit(g_test(n, p), variation, limit, impossible)


def g_test(counts: NDArray[np.float64], law: NDArray[np.float64]) -> float:
    """p-value of the G-test (log-likelihood ratio) with Williams' correction (1976); small cells are pooled."""
    total = counts.sum()
    large = law * total >= LEAST_EXPECTED
    n, p = counts[large], law[large]
    rest = 1.0 - p.sum()
    if rest * total >= 1.0:
        n, p = np.append(n, total - n.sum()), np.append(p, rest)
    if len(p) < 2:
        return 1.0
    seen = n > 0
    g = 2 * float((n[seen] * np.log(n[seen] / (total * p[seen]))).sum())
    correction = 1 + ((1 / p).sum() - 1) / (6 * total * (len(p) - 1))
    return chi_square_tail(max(0.0, g / correction), len(p) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable with `freedom` degrees of freedom is larger than `statistic`."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def marginal(law: Mapping[Cell, float], places: tuple[int, ...]) -> dict[Cell, float]:
    """The marginal distribution, or counts, at some places of the cells."""
    found: dict[Cell, float] = {}
    for cell, value in law.items():
        key = tuple(cell[i] for i in places)
        found[key] = found.get(key, 0) + value
    return found


def bound_text(probability: float) -> str:
    """A bound on a probability as text with one digit, rounded up: 1.4e-5 gives 2e-05."""
    if probability <= 0.0:
        return "0"
    exponent = math.floor(math.log10(probability))
    digit = math.ceil(probability / 10.0**exponent - 1e-9)
    return f"{digit * 10.0**exponent:.0e}"
