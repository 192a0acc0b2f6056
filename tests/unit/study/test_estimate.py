"""Predicted speed-ups: closed formulas, and a simulated machine whose costs are known."""

from __future__ import annotations

import random

import pytest

from sameseed.lengths._cost import Curve
from sameseed.request import SpecMetrics
from sameseed.study.estimate import RunCounts, chain_speedup, expected_tokens, predict, rates_of


@pytest.mark.parametrize(("rate", "k"), [(0.8, 4), (0.5, 7), (0.9, 1), (0.3, 0)])
def test_expected_tokens_of_a_constant_rate(rate: float, k: int) -> None:
    assert expected_tokens([rate] * k) == pytest.approx((1 - rate ** (k + 1)) / (1 - rate))


def test_a_chain_whose_checking_is_free_is_as_in_the_paper() -> None:
    """Theorem 3.8 of Leviathan et al.: (1 - a^(k+1)) / ((1 - a)(k c + 1)), c the draft's time over the target's."""
    target = Curve([(1, 0.02), (64, 0.02)])
    found = chain_speedup([0.7] * 5, target, step=0.002)
    assert found == pytest.approx((1 - 0.7**6) / (0.3 * (5 * 0.1 + 1)))
    assert chain_speedup([0.7] * 5, target, 0.002, overhead=0.01) < found * 1.5
    assert chain_speedup([], target, 0.002) == 1.0


def test_rates_from_counters() -> None:
    metrics = SpecMetrics()
    for accepted in (0, 1, 2, 2):
        metrics.update(3, accepted)
    assert rates_of(metrics, 3) == pytest.approx([3 / 4, 2 / 3, 0.0])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("known", [True, False])
def test_a_machine_whose_costs_are_known(batch: int, known: bool) -> None:
    """Rounds of a machine that takes exactly what the curves say: the prediction comes out."""
    target = Curve([(1, 0.010), (32, 0.041)], 64, per_token=1e-6)
    draft = Curve([(1, 0.001), (8, 0.001)])
    rng, k, context = random.Random(0), 4, 200.0
    metrics, plain = SpecMetrics(), SpecMetrics()
    seconds = drafting = 0.0
    steps = 200
    extra = batch * 136 * 1e-6
    for _ in range(steps):
        for _ in range(batch):
            right = next((i for i in range(k) if rng.random() > 0.8), k)
            metrics.update(k, right)
        drafting += k * draft.at(1)
        seconds += target.at(batch * (k + 1)) + extra + 0.0005 + k * draft.at(1)
    tokens = metrics.num_rounds + metrics.num_accepted_tokens
    plain_steps = tokens // batch
    for _ in range(plain_steps * batch):
        plain.update(0, 0)
    alone = plain_steps * (target.at(batch) + extra + 0.0005)
    before = RunCounts(plain, plain_steps, plain_steps * batch, alone + 0.1, 0.1, 0.0, plain_steps * 0.0005, context)
    after = RunCounts(metrics, steps, steps * batch, seconds + 0.1, 0.1, drafting, 9.0, context)
    found = predict(after, before, target, draft if known else None)
    assert found.speedup == pytest.approx((alone + 0.1) / (seconds + 0.1), rel=0.01)
    assert abs(found.error) < 0.01
    assert found.draft_cost == ("curve" if known else "run")
    assert found.tokens_per_round == pytest.approx(tokens / metrics.num_rounds)
    assert found.as_dict()["rows_per_round"] == pytest.approx(batch * (k + 1))
