from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from lawkit import random_prompts

from sameseed import store
from sameseed.config import SpecConfig
from sameseed.cost.curve import Curve
from sameseed.cost.running import EngineCost
from sameseed.engine.build import build_engine
from sameseed.errors import ConfigError
from sameseed.plan.acceptance import Replay
from sameseed.plan.cost import Bools, CostSpread, Floats, LevelCost, RoundCost, curve_of
from sameseed.plan.replayer import Replayer
from sameseed.plan.simulate import best_lengths, interval, simulate
from sameseed.request import SamplingParams
from sameseed.study.costs import Cost as Point, Profile
from sameseed.study.limits import Limits
from sameseed.study.measure import Run, run_batch
from sameseed.study.workload import Workload


@dataclass(frozen=True)
class Simple:
    """A row of the target takes 1 s, a step of drafting 0.1 s; a round adds 0.01 s, or 0.02 s with a draft."""

    spread: CostSpread = field(default_factory=CostSpread)

    def target(self, rows: Floats, batch: Floats, context: Floats) -> Floats:
        return rows

    def draft(self, level: int, steps: Floats, batch: Floats, context: Floats) -> Floats:
        return 0.1 * steps * (level + 1)

    def gap(self, batch: Floats, drafted: Bools) -> Floats:
        return np.where(drafted, 0.02, 0.01)

    def prefill(self, tokens: Floats, drafted: bool) -> Floats:
        return 0.001 * tokens


def made(accepted: list[list[list[int]]], sizes: tuple[int, ...] = (1, 2), levels: tuple[str, ...] = ("a",)) -> Replay:
    """A replay of chains: for each text and position, the accepted tokens of each draft size."""
    flat = np.array([row for text in accepted for row in text], np.int16).reshape(-1, len(sizes))
    offsets = np.array([0, *np.cumsum([len(text) for text in accepted])], np.int64)
    nodes = np.broadcast_to(np.array(sizes, np.int16), flat.shape).copy()
    steps = np.repeat(nodes[:, :, None], len(levels), axis=2)
    steps[:, :, 1:] = 0
    return Replay(sizes, levels, np.full(len(accepted), 10, np.int32), offsets, flat, nodes, steps)


# Draft sizes 1 and 2. The first text has tokens 0..5, the second 0..2, the third only one token.
TEXTS = made([[[1, 2], [1, 1], [0, 0], [1, 1], [0, 0]], [[0, 0], [0, 0]], []])


def test_plain_decoding_by_hand() -> None:
    found = simulate(TEXTS, Simple(), 0, 2, num_samples=5)
    # Texts 1 and 2 together: 2 rounds of 2 rows, 3 of 1; text 3 ends with its prompt. Prompts: 30 tokens.
    assert found.seconds.value == pytest.approx(2 * 2 + 3 * 1 + 5 * 0.01 + 0.03)
    assert found.tokens_per_s.value == pytest.approx(10 / found.seconds.value)
    assert found.speedup.value == 1.0
    assert (found.num_rounds, found.mean_rows, found.tokens_per_round) == (5, 7 / 5, 1.0)


def test_a_fixed_length_by_hand() -> None:
    found = simulate(TEXTS, Simple(), 2, 2, num_samples=5)
    # Text 1 begins rounds at 0 (2 right) and 3 (1 right): 5 tokens. Text 2 at 0 and 1. All drafts have 2 nodes.
    seconds = 2 * (2 + 4) + 2 * 0.2 + 2 * 0.02 + 0.03
    assert found.seconds.value == pytest.approx(seconds)
    assert found.speedup.value == pytest.approx((7 + 0.05 + 0.03) / seconds)
    assert (found.num_rounds, found.mean_rows, found.tokens_per_round) == (2, 6.0, 7 / 4)
    assert found.draft_share == pytest.approx(0.4 / (seconds - 0.03))


def test_lengths_by_batch_by_hand() -> None:
    found = simulate(TEXTS, Simple(), (1, 0), 2, num_samples=5)
    # Two plain rounds together; then text 1 alone at 2 (0 right), at 3 (1 right).
    assert found.seconds.value == pytest.approx(2 * 2 + 2 * 2 + 2 * 0.1 + 2 * 0.01 + 2 * 0.02 + 0.03)
    assert found.lengths == (1, 0)
    longer = simulate(TEXTS, Simple(), (1,), 2, num_samples=5)
    assert longer.lengths == (1, 1)


def test_the_next_prompt_takes_the_place() -> None:
    texts = made([[[0, 0]] * 3, [[0, 0]], [], [[0, 0]] * 2])
    found = simulate(texts, Simple(), 0, 2, refill=True, num_samples=5)
    # Rounds: texts 1 and 2; text 1, while the prompt of 3 gives its only token; texts 1 and 4; text 4.
    assert (found.num_rounds, found.mean_rows) == (4, 6 / 4)
    assert simulate(texts, Simple(), 0, 2, num_samples=5).num_rounds == 5
    assert simulate(texts, Simple(), 0, 1, refill=True).seconds == simulate(texts, Simple(), 0, 1).seconds


@pytest.mark.parametrize("refill", [False, True])
def test_texts_of_one_token_end_with_their_prompts(refill: bool) -> None:
    found = simulate(made([[], [], []]), Simple(), 2, 2, refill=refill, num_samples=3)
    assert (found.num_rounds, found.seconds.value, found.speedup.value) == (0, pytest.approx(0.03), 1.0)
    assert found.tokens_per_s.value == pytest.approx(100)


def test_without_samples_there_is_a_figure_alone() -> None:
    found, sure = (simulate(TEXTS, Simple(), 2, 2, num_samples=n).speedup for n in (0, 50))
    assert found.low == found.value == found.high == sure.value


def test_steps_count_for_the_level_that_guessed() -> None:
    texts = made([[[0, 0]], [[0, 0]]], levels=("low", "high"))
    texts.steps[1] = [[0, 1], [0, 2]]
    found = simulate(texts, Simple(), 2, 2, num_samples=2)
    assert found.draft_share * (6 + 0.02 + 0.2 + 0.4) == pytest.approx(0.2 + 0.4)


def test_what_is_known_of_plain_decoding_need_not_be_simulated() -> None:
    plain = simulate(TEXTS, Simple(CostSpread(0.1, 0.2, 0.3)), 0, 2)
    cost = Simple(CostSpread(0.1, 0.2, 0.3))
    given, found = (simulate(TEXTS, cost, 2, 2, plain=p).speedup for p in (plain, None))
    assert (given.value, given.low, given.high) == pytest.approx((found.value, found.low, found.high))
    assert plain.speedup.low == plain.speedup.high == 1.0


def some_texts(rng: np.random.Generator, num_texts: int, right: float) -> Replay:
    """Texts of 40 to 90 tokens; each has its own probability that the next token is right."""
    texts = []
    for rate in np.clip(rng.normal(right, 0.1, num_texts), 0.05, 0.95):
        length = int(rng.integers(40, 90))
        runs = rng.geometric(1 - rate, length) - 1
        texts.append([[min(int(run), size, length - i) for size in (1, 2, 4)] for i, run in enumerate(runs)])
    return made(texts, (1, 2, 4))


def test_intervals_hold_as_often_as_they_say() -> None:
    """About 80 % of the intervals from 12 prompts contain the speed-up of very many prompts."""
    rng = np.random.default_rng(0)
    cost = RoundCost(Curve([(1, 1.0), (8, 1.2)]), plain_gap=0.1, drafted_gap=0.2)
    truth = simulate(some_texts(rng, 3000, 0.6), cost, 4, 1, num_samples=2).speedup.value
    found = [simulate(some_texts(rng, 12, 0.6), cost, 4, 1, seed=i).speedup for i in range(200)]
    assert 0.72 <= np.mean([f.low <= truth <= f.high for f in found]) <= 0.9
    assert all(f.low <= f.value <= f.high for f in found)


def test_costs_that_are_unsure_widen_the_interval() -> None:
    texts = some_texts(np.random.default_rng(1), 12, 0.6)
    sure, unsure = (simulate(texts, Simple(CostSpread(draft=s)), 4, 2, num_samples=200).speedup for s in (0.0, 0.5))
    assert unsure.value == sure.value
    assert unsure.high - unsure.low > sure.high - sure.low
    # A machine that is slower in everything changes no speed-up.
    start = [simulate(texts, Simple(CostSpread(s, s, s)), 0, 2, num_samples=50) for s in (0.0, 0.5)]
    assert start[1].tokens_per_s.low < start[0].tokens_per_s.low
    assert start[1].speedup == start[0].speedup


def test_interval_of_one_sample() -> None:
    assert interval(np.array([2.0]), 5).low == 2.0


def test_best_lengths_are_those_of_an_exhaustive_search() -> None:
    texts = some_texts(np.random.default_rng(2), 40, 0.7)
    flat = RoundCost(Curve([(1, 1.0), (64, 1.1)]), (LevelCost(step=Curve([(1, 0.01)])),))
    assert best_lengths(texts, flat, 3) == (4, 4, 4)
    steep = RoundCost(Curve([(1, 1.0), (2, 2.0)]), (LevelCost(step=Curve([(1, 0.5)])),))
    assert best_lengths(texts, steep, 3) == (0, 0, 0)
    bends = RoundCost(Curve([(1, 1.0), (8, 1.1), (16, 2.6)]), (LevelCost(step=Curve([(1, 0.05), (8, 0.06)])),))
    chosen = best_lengths(texts, bends, 8)
    for b in (1, 2, 4, 8):
        rates = {k: simulate(texts, bends, k, b, num_samples=2).tokens_per_s.value for k in (0, 1, 2, 4)}
        best = simulate(texts, bends, chosen, b, num_samples=2).tokens_per_s.value
        assert best >= 0.98 * max(rates.values()), (b, chosen, rates)
    assert best_lengths(texts, bends, 1, margin=100.0) == (0,)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="drafts of 5 tokens were not replayed; choose one of 1, 2"):
        simulate(TEXTS, Simple(), 5)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        simulate(TEXTS, Simple(), 1, 0)
    with pytest.raises(ConfigError, match="give one at least"):
        simulate(TEXTS, Simple(), (), 1)
    with pytest.raises(ConfigError, match="two prompts or more"):
        simulate(made([[[0, 0]]]), Simple(), 1)


def test_round_cost() -> None:
    curve = Curve([(1, 1.0), (3, 2.0)], 64, per_token=0.01, per_row=0.001)
    cost = RoundCost(curve, (LevelCost(0.5, Curve([(1, 0.1), (2, 0.2)]), 2, 1.024),), 0.1, 0.2, 0.01)
    one, two = np.array([1.0]), np.array([2.0])
    assert cost.target(two, one, np.array([64.0])) == pytest.approx(1.5)
    assert cost.target(np.array([5.0]), one, np.array([64.0])) == pytest.approx(3.0)
    assert cost.target(two, two, np.array([164.0])) == pytest.approx(1.5 + 0.01 * 264 + 0.001 * 2 * 100)
    assert cost.draft(3, two, one, np.array([10.0])) == pytest.approx(0.5 + 2 * (0.2 + 0.01))
    assert cost.gap(two, np.array([True])) == pytest.approx(0.22)
    assert cost.prefill(np.array([0.0]), True) == 0.0
    slower = replace(cost, rows_scale=2.0, draft_scale=3.0)
    assert slower.target(one, one, two) == cost.target(one, one, two)
    added = cost.target(two, one, two) - cost.target(one, one, two)
    assert slower.target(two, one, two) == pytest.approx(cost.target(one, one, two) + 2 * added)
    assert slower.draft(0, two, one, two) == 3 * cost.draft(0, two, one, two)
    prompts = np.array([600.0])
    assert slower.prefill(prompts, False) == cost.prefill(prompts, False)
    reading = cost.prefill(prompts, True) - cost.prefill(prompts, False)
    assert slower.prefill(prompts, True) == pytest.approx(slower.prefill(prompts, False) + 3 * reading)
    engine = EngineCost(curve)
    engine.draft.coefficients[:] = (0.1, 0.0, 0.2, 0.05, 0.4)
    engine.gap.plain.coefficients[:], engine.gap.plain.seen = (0.3, 0.01), 1
    engine.gap.drafted.coefficients[:], engine.gap.drafted.seen = (0.32, 0.02), 1
    fitted = RoundCost.of(engine)
    assert fitted.draft(0, two, one, np.array([512.0])) == pytest.approx(0.1 + 2 * (0.25 + 0.2))
    assert fitted.draft(0, one, two, np.array([0.0])) == pytest.approx(0.1 + 0.3)
    assert fitted.gap(two, np.array([True])) == pytest.approx(0.34)


def point(context: int, rows: int, ms: float) -> Point:
    return Point("w4a8", "bf16", context, rows, ms, 1.0, 0.9 * ms, 1.1 * ms, 5, 1.0, 1.0)


def test_costs_from_a_profile() -> None:
    points = tuple(
        point(c, m, 10 + 0.5 * (m - 1) + (c - 64) * (0.01 + 0.001 * m)) for c in (64, 1064) for m in (1, 2, 8)
    )
    limits = Limits(1, 1.0, None, 1.0, None, {}, {}, "native")
    profile = Profile({}, points, (), (), (), limits)
    curve = curve_of(profile, "w4a8")
    assert (curve.context, curve.per_token, curve.per_row) == pytest.approx((64, 1e-5, 1e-6))
    cost = RoundCost.from_profile(profile, "w4a8")
    assert cost.target(np.array([2.0]), np.array([1.0]), np.array([564.0])) == pytest.approx(0.0105 + 500e-6 * 12)
    assert 0.0 < cost.spread.target < 0.2
    with pytest.raises(ConfigError, match="was not profiled"):
        RoundCost.from_profile(profile, "w8a8")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rounds_are_those_of_an_engine(
    pair_folders: tuple[Path, Path], batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes, rows and decided tokens equal those of a real run; only the clock is simulated."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    target, draft = map(str, pair_folders)
    prompts = (*map(tuple, random_prompts(4)), (7, 8, 9, 7, 8, 9))
    workload = Workload("test", prompts, SamplingParams(max_tokens=24, temperature=0.8, seed=2), batch_size)
    replayer = Replayer(target)
    texts = replayer.texts(workload)
    replay = replayer.replay(SpecConfig("draft_model", draft), texts, 4)
    for size in (0, 1, 3):
        found = simulate(replay, Simple(), size, batch_size, num_samples=2)
        spec = SpecConfig("draft_model", draft, num_draft_tokens=size)
        config = Replayer(target, {"max_model_len": 256}, batch_size).config
        engine, run = build_engine(target, replace(config, spec=spec)), Run()
        for batch in workload.batches():
            run_batch(engine, batch, run)
        assert run.texts == [t.tokens for t in texts]
        num_batches = -(-len(prompts) // batch_size)
        assert run.num_steps == found.num_rounds + num_batches
        decided = run.metrics.num_rounds - len(prompts)
        rows = decided + run.metrics.num_draft_tokens
        assert found.mean_rows == pytest.approx(rows / found.num_rounds)
        assert found.tokens_per_round == pytest.approx((replay.num_tokens.sum() - len(prompts)) / decided)
