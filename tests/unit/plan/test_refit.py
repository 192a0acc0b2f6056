from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sameseed.cost.curve import Curve
from sameseed.plan.acceptance import Replay
from sameseed.plan.cost import LevelCost, Residuals, RoundCost
from sameseed.plan.refit import NOISE, PARTS, Probe, left_of, refit, ridge
from sameseed.plan.simulate import simulate

SIZES = (1, 2, 3, 4, 6, 8)


def chains(num_texts: int = 12, length: int = 40, rate: float = 0.7) -> Replay:
    """A replay of chains in which each token is right with probability `rate`."""
    rng = np.random.default_rng(3)
    right = rng.random((num_texts * length, SIZES[-1])) < rate
    run = np.where(right.all(1), SIZES[-1], right.argmin(1))
    left = np.tile(np.arange(length, 0, -1), num_texts)
    accepted = np.minimum(np.minimum(run[:, None], np.array(SIZES)), left[:, None] - 1).astype(np.int16)
    nodes = np.broadcast_to(np.array(SIZES, np.int16), accepted.shape).copy()
    offsets = np.arange(num_texts + 1, dtype=np.int64) * length
    return Replay(SIZES, ("a",), np.full(num_texts, 10, np.int32), offsets, accepted, nodes, nodes[:, :, None].copy())


def costs(rows: float = 1.0, draft: float = 1.0, gap: float = 1.0) -> RoundCost:
    """Costs of a target whose passes cost more with every row, and of a draft that costs a fifth."""
    curve = Curve([(1, 1.0), *((m, 1.0 + rows * 0.05 * (m - 1)) for m in (2, 8, 64))], 16)
    steps = LevelCost(0.0, Curve([(1, draft * 0.2), (64, draft * 0.4)]), reads=False)
    return RoundCost(curve, (steps,), 0.1, 0.1 + gap * 0.1)


def probes(replay: Replay, real: RoundCost) -> list[Probe]:
    """Noise-free timings of a short draft and of the longest, for one sequence and for four together."""
    found = []
    for batch in (1, 4):
        plain = simulate(replay, real, 0, batch, num_samples=0)
        for k in (3, 8):
            took = simulate(replay, real, k, batch, num_samples=0).seconds.value
            found.append(Probe((k,) * batch, batch, took / plain.seconds.value))
    return found


@pytest.mark.parametrize(("rows", "draft", "gap"), [(1.0, 1.0, 1.0), (1.6, 1.0, 1.0), (1.0, 2.5, 1.0), (0.7, 0.6, 2.0)])
def test_settings_that_never_ran_are_promised_rightly(rows: float, draft: float, gap: float) -> None:
    replay, measured, real = chains(), costs(), costs(rows, draft, gap)
    found = refit(replay, measured, probes(replay, real))
    for batch in (1, 2, 4):
        for k in (1, 2, 4, 6):
            got = simulate(replay, found, k, batch, num_samples=0).speedup.value
            true = simulate(replay, real, k, batch, num_samples=0).speedup.value
            before = simulate(replay, measured, k, batch, num_samples=0).speedup.value
            assert abs(got / true - 1.0) < max(0.02, 0.25 * abs(before / true - 1.0)), (batch, k)


def test_what_runs_do_not_tell_stays_as_it_was_measured() -> None:
    found, _ = ridge(np.zeros((0, PARTS)), np.zeros(0))
    assert found == pytest.approx(np.ones(PARTS))
    free = replace(costs(), levels=(LevelCost(),))  # a draft that costs nothing
    assert refit(chains(), free, probes(chains(), costs(2.0))).draft_scale == pytest.approx(1.0)


def test_how_far_off_runs_are_is_stated() -> None:
    replay = chains()
    right = probes(replay, costs())
    noisy = [replace(p, ratio=p.ratio * f) for p, f in zip(right, (1.3, 0.7, 0.7, 1.3), strict=True)]
    sure, unsure = (refit(replay, costs(), seen).spread.drafted for seen in (right, noisy))
    assert sure < NOISE < 0.1 < unsure
    one = simulate(replay, refit(replay, costs(), noisy), 4).speedup
    other = simulate(replay, refit(replay, costs(), right), 4).speedup
    assert one.high / one.low > 1.2 * other.high / other.low


def test_what_no_scale_explains_is_taken_by_draft_size() -> None:
    replay = chains()

    def real(k: int, batch: int) -> float:
        """True seconds: twice the simulated ones for drafts of more than two tokens."""
        return simulate(replay, costs(), k, batch, num_samples=0).seconds.value * (2.0 if k > 2 else 1.0)

    seen = [
        Probe((k,) * b, b, real(k, b) / simulate(replay, costs(), 0, b, num_samples=0).seconds.value)
        for b in (1, 4)
        for k in (1, 3, 8)
    ]
    found = refit(replay, costs(), seen)
    straight, bent = [], []
    for batch, k in ((1, 1), (1, 4), (2, 8), (4, 6), (4, 1)):
        for off, left in ((None, straight), (found.residuals.at(batch, k), bent)):
            took = simulate(replay, found, k, batch, num_samples=0, off=off).seconds.value
            left.append(abs(took / real(k, batch) - 1.0))
    assert max(bent) < 0.02 < 0.05 < max(straight)


def test_a_policy_that_chooses_lengths_has_residuals_of_its_own() -> None:
    replay = chains()
    right = probes(replay, costs())
    own = [Probe((8,) * b, b, p.ratio * 1.25) for b, p in zip((1, 4), (right[1], right[3]), strict=True)]
    found = Residuals(left_of(replay, refit(replay, costs(), right), own, adapts=True))
    assert found.at(1, 8) == 1.0 and found.at(1, 0) == found.at(2, 0) == pytest.approx(1.25, rel=0.01)
    plain, tried = (simulate(replay, costs(), 0, 1, off=off).speedup.value for off in (None, 1.25))
    assert (plain, tried) == pytest.approx((1.0, 0.8)), "what finding out takes counts where nothing is drafted too"


def test_residuals_lie_between_those_of_the_nearest_batch_size() -> None:
    some = Residuals(((1, 2, 0.2), (1, 8, 0.4), (8, 2, -0.1), (8, 0, 0.7)))
    found = [np.log(some.at(*at)) for at in ((1, 4), (2, 2), (3, 2), (1, 1), (1, 32), (64, 9), (1, 0))]
    assert found == pytest.approx([0.3, 0.2, -0.1, 0.2, 0.4, -0.1, 0.7])
    assert Residuals().at(4, 2) == 1.0
