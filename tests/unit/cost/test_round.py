"""Costs of rounds and what drafts then bring: by hand, from a profile, from another engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sameseed.cost.curve import Curve
from sameseed.cost.round import PAYS, Gap, ModelSteps, PlaceRates, RoundCost, best, expected, lengths_by_batch
from sameseed.cost.running import EngineCost
from sameseed.errors import ConfigError
from sameseed.measure.costs import Cost as Point, Profile
from sameseed.measure.limits import Limits
from sameseed.plan.engines import EngineCosts, EnginePass

COST = RoundCost(Curve([(1, 1.0), (3, 2.0)], 64, per_token=0.01, per_row=0.001), (), Gap(0.1, 0.2))
DRAFT = Curve([(1, 0.1), (2, 0.2)])


def test_parts_of_a_round_by_hand() -> None:
    assert COST.target(2, 1, 64) == pytest.approx(1.5) and COST.target(5, 1, 64) == pytest.approx(3.0)
    assert COST.target(2, 2, 164) == pytest.approx(1.5 + 0.01 * 264 + 0.001 * 2 * 100)
    cost = replace(COST, levels=(ModelSteps(DRAFT, start=0.5, each=0.01),))
    assert cost.draft(3, 1, 0, 2.0) == pytest.approx(0.51 + 0.2 + 2 * 0.1), "the first pass reads two tokens"
    assert RoundCost(DRAFT).draft(3, 1, 0, 2.0) == 0.0, "no level"
    at_once = replace(COST, levels=(ModelSteps(DRAFT, at_once=True),))
    assert at_once.draft(3, 1, 0, 2.0) == pytest.approx(DRAFT.at(4))
    flat = RoundCost(Curve([(1, 1.0), (512, 512.0)]), (ModelSteps(Curve([(1, 0.1), (512, 51.2)])),))
    assert flat.prompt(600) == pytest.approx(600) and flat.prompt(600, drafted=True) == pytest.approx(660)
    assert replace(flat, prompts=lambda n: 2 * n).prompt(600) == 1200


def test_what_a_round_brings_by_hand() -> None:
    cost = replace(COST, levels=(ModelSteps(DRAFT),))
    found = expected(cost, PlaceRates((0.5, 1.0)), 2, 1)
    assert found.tokens == 2.0
    assert (found.target, found.draft, found.gap) == pytest.approx((2.0, 0.2 + 0.1, 0.2))
    assert found.speedup == pytest.approx(2.0 * 1.1 / 2.5) and found.tokens_per_s == pytest.approx(2 / 2.5)
    assert found.whole(3.0, 4.0, 100) == pytest.approx((3.0 + 110.0) / (4.0 + 125.0))
    none = expected(cost, PlaceRates((0.5,)), 0, 4)
    assert none.speedup == 1.0 and none.seconds == none.plain == pytest.approx(2.5 + 0.1)


def test_the_best_length_by_batch() -> None:
    flat = RoundCost(Curve([(1, 1.0), (8, 1.1), (16, 2.6)]), (ModelSteps(Curve([(1, 0.05), (8, 0.06)])),))
    rates, ks = PlaceRates((0.7,)), range(1, 9)
    for batch in (1, 2, 4, 8):
        speeds = {k: expected(flat, rates, k, batch).speedup for k in ks}
        found = max(speeds, key=speeds.__getitem__) if max(speeds.values()) >= PAYS else 0
        assert best(flat, rates, ks, batch)[0] == found
    table = lengths_by_batch(flat, rates, ks, 32)
    assert table[0][0] == 1 and [a for a, _, _ in table[1:]] == [b + 1 for _, b, _ in table[:-1]]
    assert table[0][2] > table[-1][2], "many sequences fill the pass by themselves"
    assert best(flat, rates, ks, 1, least=100.0) == (0, 1.0)


def test_costs_of_a_running_engine() -> None:
    engine = EngineCost(Curve([(1, 1.0), (3, 2.0)]), catch_up=0.5)
    engine.draft.coefficients[:] = (0.1, 0.0, 0.2, 0.05, 0.4)
    engine.gap.plain.coefficients[:], engine.gap.plain.seen = (0.3, 0.01), 1
    engine.gap.drafted.coefficients[:], engine.gap.drafted.seen = (0.32, 0.02), 1
    cost = engine.whole
    assert cost.draft(2, 1, 512, 1.0) == pytest.approx(0.1 + 2 * (0.25 + 0.2))
    assert cost.gap(2, True) == pytest.approx(0.36) and cost.gap(2, False) == pytest.approx(0.32)
    assert cost.prompt(3, drafted=True) - cost.prompt(3) == pytest.approx(1.5)


def test_costs_of_a_profile_and_of_another_engine() -> None:
    points = tuple(
        Point("w4a8", "bf16", c, m, ms, 1.0, 0.9 * ms, 1.1 * ms, 5, 1.0, 1.0)
        for c in (64, 1064)
        for m in (1, 2, 8)
        for ms in [10 + 0.5 * (m - 1) + (c - 64) * (0.01 + 0.001 * m)]
    )
    profile = Profile({}, points, (), (), (), Limits(1, 1.0, None, 1.0, None, {}, {}, "native"))
    curve = profile.curve("w4a8")
    assert (curve.context, curve.per_token, curve.per_row) == pytest.approx((64, 1e-5, 1e-6))
    cost = profile.cost("w4a8")
    assert cost.target(2, 1, 564) == pytest.approx(0.0105 + 500e-6 * 12) and cost.grade == "profiled"
    assert 0.0 < cost.spread < 0.2
    with pytest.raises(ConfigError, match="profiled"):
        profile.cost("w8a8")
    passes = tuple(EnginePass(b, b * n, 10 + b * n * 0.1) for b in (1, 16) for n in (1, 5, 9))
    other = EngineCosts("vllm", passes).cost()
    assert other.target(3, 1) == pytest.approx(0.0103) and other.target(80, 16) == pytest.approx(0.018)
