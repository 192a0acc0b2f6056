"""The tests of fit accept draws from the right law and reject draws from a nearby law."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sameseed.laws.statistics import ALPHA, chi_square_tail, g_test, marginal, target_law

LAW = {(i,): p for i, p in enumerate((0.4, 0.3, 0.2, 0.0999, 0.0001))}


def draws(law: dict[tuple[int, ...], float], count: int, seed: int = 0) -> Counter[tuple[int, ...]]:
    cells = list(law)
    p = np.array(list(law.values()))
    picked = np.random.default_rng(seed).choice(len(cells), size=count, p=p / p.sum())
    return Counter(cells[i] for i in picked)


def test_draws_from_the_law_fit() -> None:
    values = [target_law(draws(LAW, 4000, seed), LAW) for seed in range(200)]
    assert all(v.good for v in values)
    p = sorted(v.p_value for v in values)
    assert 0.4 < p[100] < 0.6, "p-values are uniform"
    assert p[10] < 0.15


def test_draws_from_a_law_nearby_do_not() -> None:
    other = {**LAW, (0,): 0.43, (1,): 0.27}
    assert not target_law(draws(other, 20_000), LAW).good
    spread = {(i,): 1 / 4096 for i in range(4096)}
    skewed = {c: p * (1.4 if c[0] % 2 else 0.6) for c, p in spread.items()}
    assert target_law(draws(spread, 40_000), spread).good
    assert not target_law(draws(skewed, 40_000), spread).good


def test_what_the_law_rules_out_never_passes() -> None:
    counts = draws(LAW, 4000)
    counts[(9,)] += 1
    assert target_law(counts, LAW).impossible == 1
    assert not target_law(counts, LAW).good
    assert target_law(Counter({(0,): 10}), {(0,): 1.0, (1,): 0.0}).good
    assert not target_law(Counter({(0,): 10, (1,): 1}), {(0,): 1.0, (1,): 0.0}).good


def test_tails() -> None:
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, abs=1e-6)
    assert chi_square_tail(18.307038, 10) == pytest.approx(0.05, abs=1e-6)
    assert g_test(np.array([50.0, 50.0]), np.array([0.5, 0.5])) == pytest.approx(1.0)
    assert g_test(np.array([900.0, 100.0]), np.array([0.5, 0.5])) < ALPHA


def test_marginals() -> None:
    law = {(0, 0): 0.5, (0, 1): 0.2, (1, 0): 0.3}
    assert marginal(law, (0,)) == {(0,): pytest.approx(0.7), (1,): pytest.approx(0.3)}
    assert marginal(law, (1, 0)) == {(0, 0): 0.5, (1, 0): 0.2, (0, 1): 0.3}
