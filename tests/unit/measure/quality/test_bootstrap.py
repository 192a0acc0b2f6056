from __future__ import annotations

import math

import numpy as np
import pytest

from sameseed.measure.quality.perplexity import mean_interval, ratio_interval


def test_the_interval_of_a_mean_is_near_the_normal_one() -> None:
    scores = [1.0] * 60 + [0.0] * 140
    low, high = mean_interval(scores, 3)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 200)
    assert (low, high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.012)


def test_it_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for i in range(200):
        low, high = ratio_interval(generator.exponential(2.0, 80).tolist(), [1.0] * 80, i, resamples=400)
        hits += low <= 2.0 <= high
    assert 0.87 <= hits / 200 <= 0.99


def test_seeded() -> None:
    scores = [0.0, 1.0, 1.0, 0.5]
    assert mean_interval(scores, 1) == mean_interval(scores, 1)
    spread = [mean_interval(list(np.random.default_rng(0).normal(size=30)), seed) for seed in (1, 2)]
    assert spread[0] != spread[1]


def test_units_weigh_by_their_wholes() -> None:
    assert ratio_interval([8.0, 2.0], [4.0, 1.0], 0) == (2.0, 2.0)


def test_without_units_there_is_none() -> None:
    assert mean_interval([1.0], 0) is None and ratio_interval([0.0, 0.0], [0.0, 0.0], 0) is None
