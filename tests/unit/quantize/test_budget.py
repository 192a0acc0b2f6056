"""The knapsack against all combinations, and the parts of a rotation."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import asdict

import pytest
import torch
from fixtures_ops import randn

from sameseed.errors import ConfigError
from sameseed.quantize._budget import STEPS, Sensitivity, assign, recommend
from sameseed.quantize.rotate import rotate_columns, rotate_rows, spread

CANDIDATES = [("w4a16-g128", 4.125), ("w4a16-g32", 4.5), ("w8a16", 8.1), ("bf16", 16.0)]


def units(seed: int, count: int = 5) -> list[Sensitivity]:
    rng = random.Random(seed)
    found = []
    for u in range(count):
        size, hurt = rng.choice([100, 300, 1000]), rng.random()
        for scheme, bits in CANDIDATES:
            loss = 0.0 if scheme == "bf16" else hurt * 4 ** -(bits - 4) * rng.uniform(0.7, 1.3)
            found.append(Sensitivity(f"unit{u}", (f"unit{u}.a", f"unit{u}.b"), scheme, bits, size, loss))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("budget", [4.125, 4.4, 5.0, 7.5, 16.0])
def test_the_choice_is_the_best_of_all(seed: int, budget: float) -> None:
    rows = units(seed)
    found = assign(rows, budget)
    assert found.bits <= budget * (1 + 1e-9)
    choices = [[r for r in rows if r.unit == f"unit{u}"] for u in range(5)]
    weights = sum(c[0].num_weights for c in choices)
    feasible = [
        sum(r.loss for r in pick)
        for pick in itertools.product(*choices)
        # The knapsack rounds each cost up, by less than a step of the bits that it can spend.
        if sum(r.bits * r.num_weights for r in pick) <= (budget - (budget - 4.125) * 5 / STEPS) * weights
    ]
    assert found.predicted_loss <= min(feasible, default=math.inf) + 1e-12
    assert found.predicted_loss == pytest.approx(sum(r.loss for r in found.chosen.values()))
    assert {glob: str(s) for glob, s in found.rules} == {m: r.scheme for r in found.chosen.values() for m in r.modules}


def test_too_small_a_budget() -> None:
    with pytest.raises(ConfigError, match=r"below the smallest candidates' 4\.125"):
        assign(units(0), 4.0)


def test_advice() -> None:
    rows = units(1)
    worst = Sensitivity("bad", ("bad.q",), "w4a16-g128", 4.125, 10, 50.0)
    modules = [{"module": "bad.q", "scheme": "w4a16-g128", "relative": 0.1, "num_weights": 10}]
    modules += [{"module": r.modules[0], "scheme": r.scheme} for r in rows if r.scheme == "w4a16-g128"]
    advice = recommend({"sensitivity": [asdict(r) for r in (*rows, worst)], "modules": modules})
    assert advice[0].modules == ("bad.q",) and "of the loss in" in advice[0].reason


def test_advice_by_errors_names_what_stands_out() -> None:
    modules = [{"module": f"m{i}", "scheme": "w4a16", "relative": 0.1, "num_weights": 100} for i in range(9)]
    modules.append({"module": "bad", "scheme": "w4a16", "relative": 0.4, "num_weights": 100})
    (advice,) = recommend({"modules": modules, "sensitivity": None})
    assert advice.modules == ("bad",) and advice.of_weights == pytest.approx(0.1)
    assert recommend({"modules": modules[:-1], "sensitivity": None}) == []


@pytest.mark.parametrize("size", [1, 2, 12, 20, 48, 96, 128, 3 * 64, 7 * 32])
def test_rotations_are_orthogonal_and_spread(size: int) -> None:
    matrix = spread(torch.eye(size))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-5)
    assert matrix.abs().max() <= math.sqrt(2 / size) + 1e-6, "no entry stands out"
    if size & (size - 1) == 0:
        assert torch.allclose(matrix.abs(), torch.full_like(matrix, size**-0.5)), "Hadamard"


def test_rows_and_columns_turn_alike() -> None:
    x, weight = randn(5, 48), randn(48, 16, seed=1)
    assert torch.allclose(rotate_rows(x, 3) @ rotate_columns(weight, 3), x @ weight, atol=1e-4)
    spike = torch.zeros(1, 96)
    spike[0, 7] = 100.0
    assert rotate_rows(spike, 3).abs().max() < 15
