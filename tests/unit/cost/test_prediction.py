"""Predicted speed-ups: a simulated machine whose costs are known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sameseed.cost.curve import Curve
from sameseed.cost.prediction import RunCounts, predict
from sameseed.request import SpecMetrics


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("known", [True, False])
def test_a_machine_whose_costs_are_known(batch: int, known: bool, at_once: bool) -> None:
    """Simulate rounds that take exactly the time of the curves: the prediction must match."""
    target = Curve([(1, 0.010), (32, 0.041)], 64, per_token=1e-6)
    draft = Curve([(1, 0.001), (8, 0.001)]) if not at_once else Curve([(1, 0.001), (64, 0.00352)])
    rng, k, context = random.Random(0), 4, 200.0
    metrics, plain = SpecMetrics(), SpecMetrics()
    seconds = drafting = 0.0
    steps = 200
    extra = batch * 136 * 1e-6
    for _ in range(steps):
        decided = 0
        for _ in range(batch):
            right = next((i for i in range(k) if rng.random() > 0.8), k)
            metrics.update(k, right)
            decided += right + 1
        took = draft.at(decided + batch * (k - 1)) if at_once else k * draft.at(1)
        drafting += took
        seconds += target.at(batch * (k + 1)) + extra + 0.0005 + took
    plain_steps = (tokens := metrics.num_rounds + metrics.num_accepted_tokens) // batch
    for _ in range(plain_steps * batch):
        plain.update(0, 0)
    alone = plain_steps * (target.at(batch) + extra + 0.0005)
    before = RunCounts(plain, plain_steps, plain_steps * batch, alone + 0.1, 0.1, 0.0, plain_steps * 0.0005, context)
    after = RunCounts(metrics, steps, steps * batch, seconds + 0.1, 0.1, drafting, 9.0, context)
    found = predict(after, before, target, draft if known else None, at_once)
    if known:  # then the draft model's passes over the prompts are counted, too
        read = replace(after, prompts=(100,) * batch, seconds=after.seconds + batch * draft.at(100))
        assert abs(predict(read, before, target, draft, at_once).error) < 0.01
    assert found.speedup == pytest.approx((alone + 0.1) / (seconds + 0.1), rel=0.01)
    assert abs(found.error) < 0.01 and abs(found.decode_error) < 0.01
    assert found.decode_speedup == pytest.approx(alone / seconds, rel=0.01)
    assert found.draft_cost == ("curve" if known else "run")
    assert found.tokens_per_round == pytest.approx(tokens / metrics.num_rounds)
    assert found.as_dict()["rows_per_round"] == pytest.approx(batch * (k + 1))
