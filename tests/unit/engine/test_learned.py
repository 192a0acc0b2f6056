"""What goodput learned is used by the next process: costs rescaled to today's speed, acceptance rates in part."""

import math

import numpy as np
import pytest

from sameseed import store
from sameseed.config import SpecConfig
from sameseed.cost.curve import Curve
from sameseed.cost.running import EngineCost
from sameseed.engine import calibrate
from sameseed.engine.calibrate import measure_curve, measure_engine, measure_rounds
from sameseed.engine.learned import FIRST, KIND, LearnedTable
from sameseed.engine.llm import LLM
from sameseed.lengths._acceptance import KEPT, Acceptance, DraftNodes
from sameseed.lengths.goodput import GoodputLength
from sameseed.request import SamplingParams


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / KIND


def policy_that_knows():
    policy = GoodputLength(4, Curve([(1, 0.1), (8, 0.2)], 64, 1e-6, 1e-7))
    for n in range(20):
        policy.cost.draft.learn(n % 4, 2, 100.0, 0.01 + 0.002 * (n % 4))
        policy.cost.gap.correct(2.0 + n % 3, n % 2 == 1, 0.001 * (1 + n % 2))
        policy.acceptance.learn(7, 4, DraftNodes(range(-1, 3), None, policy.acceptance.rates(7)), range(n % 5))
    policy.cost.ratios = {(True, 1): 1.1, (False, 3): 0.9}
    return policy


def kept(policy, key="key"):
    table = LearnedTable(policy, key)
    for _ in range(FIRST):
        table.passed()


def begun(key="key"):
    """A policy that took over a table, and whether it was measured anew."""
    policy, measured = GoodputLength(4), EngineCost(Curve([(1, 9.0)]))
    LearnedTable(policy, key).begin(lambda: measured)
    return policy, policy.cost is measured


def test_a_table_comes_back():
    before = policy_that_knows()
    kept(before)
    after, measured = begun()
    assert before.cost is not None and after.cost is not None and not measured
    for name, array in before.cost.as_arrays().items():
        np.testing.assert_allclose(after.cost.as_arrays()[name], array, err_msg=name)
    # What lay between passes in a busy hour could keep later engines from drafting.
    assert not after.cost.gap.seen and not after.cost.ratios
    ours, theirs = after.acceptance.as_arrays(), before.acceptance.as_arrays()
    for name in ("kinds", "ranks", "said"):
        np.testing.assert_allclose(ours[name], KEPT * theirs[name], err_msg=name)
    before.cost.draft.learn(2, 2, 100.0, 0.5)
    after.cost.draft.learn(2, 2, 100.0, 0.5)
    np.testing.assert_allclose(after.cost.draft.as_array(), before.cost.draft.as_array(), err_msg="learns on alike")


def test_scaled_costs_are_those_of_a_slower_machine():
    policy = policy_that_knows()
    curve, draft, gap = policy.cost.target.at(8), policy.cost.draft.terms(2, 100.0), policy.cost.gap.at(2, True)
    policy.cost.scale(2.0)
    assert policy.cost.target.at(8) == pytest.approx(2 * curve)
    assert policy.cost.draft.terms(2, 100.0) == pytest.approx([2 * s for s in draft])
    assert policy.cost.gap.at(2, True) == gap, "Python is no slower where memory is"


def test_what_was_measured_is_not_measured_at_the_next_start(cache):
    assert begun()[1] and len(list(cache.glob("*.npz"))) == 1
    policy, measured = begun()
    assert not measured and policy.cost is not None and policy.cost.target.at(1) == 9.0


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e300, "words", None])
def test_what_a_glitch_of_the_clock_wrote_or_is_broken_is_measured_again(value, cache, caplog):
    """The file is whole and its digest right: what it holds cannot be of such an engine."""
    kept(policy_that_knows())
    found = store.read(KIND, "key")
    flat = {name: a.ravel()[:1] for name, a in found.items()}
    store.write(KIND, "key", flat if value is None else found | {"target": np.full(found["target"].shape, value)})
    policy, measured = begun()
    assert measured and "broken" in caplog.text and policy.cost is not None and policy.cost.target.at(1) == 9.0


def test_an_engine_begins_with_what_the_last_one_learned(pair_folders, cache):
    target, draft = map(str, pair_folders)
    params = SamplingParams(max_tokens=2 * FIRST + 80, ignore_eos=True)
    texts = []
    for _ in range(2):
        llm = LLM(target, draft=draft, num_draft_tokens=1)
        texts.append((len(list(cache.glob("*.npz"))), llm.generate([[5, 6, 7]], params)[0].token_ids))
    assert [count for count, _ in texts] == [1, 1] and texts[0][1] == texts[1][1]
    LLM(target, draft=draft, num_draft_tokens=2).generate([[5, 6, 7]], params)
    assert len(list(cache.glob("*.npz"))) == 2, "another length is another table"


def test_a_drafter_without_a_name_keeps_nothing(pair_folders, cache):
    from sameseed.drafters.ngram import DRAFTER

    LLM(str(pair_folders[0]), draft=DRAFTER, num_draft_tokens=2).generate(
        [[5, 6, 7]], SamplingParams(max_tokens=3 * FIRST, ignore_eos=True)
    )
    assert not cache.exists()
    assert SpecConfig().drafter is None and Acceptance(4).as_arrays()["kinds"].sum() == 0.0


def test_a_looping_text_does_not_hide_what_the_model_behind_a_lookup_costs(pair_folders, monkeypatch, spied):
    target, draft = map(str, pair_folders)
    engine = LLM(target, draft=f"suffix + {draft}", policy="fixed").engine
    first = engine.drafter
    asked = [
        spied(drafter, "propose", lambda _, lengths: sum(k > 0 for k in lengths)) for drafter in (first, *first.below)
    ]
    monkeypatch.setattr(calibrate, "QUICK", math.inf)  # two rounds before the measured ones, on a slow machine too
    measure_rounds(engine.runner, first, seconds=60.0)
    assert min(map(sum, asked)) >= 58, "two rounds before and ten with drafts, of one sequence and of four"


def test_an_engine_tells_what_lies_between_its_passes_and_counts_nothing_of_it(pair_folders):
    target, draft = map(str, pair_folders)
    engine = LLM(target, draft=draft, policy="goodput", max_num_seqs=2).engine
    policy, alarm, before = engine.policy, engine.alarm, [vars(m.copy()) for _, m in engine.drafter.counted()]
    assert not measure_rounds(engine.runner, engine.drafter).gap.seen
    cost = measure_engine(engine, 1.0)
    assert cost.gap.seen > 50 and cost.gap.at(1, False) > 0.0
    assert max(cost.draft.terms(1)) > 0.0  # noise may move all of the cost to one of start and step
    assert engine.policy is policy and engine.alarm is alarm and not engine.has_work
    assert not engine.metrics.num_rounds and not engine.times.target
    assert [vars(m) for _, m in engine.drafter.counted()] == before


def test_an_engine_with_a_tiny_context_is_measured_too(pair_folders):
    engine = LLM(str(pair_folders[0]), max_model_len=8, max_num_seqs=1).engine
    assert measure_engine(engine, 0.1).gap.seen


def test_passes_are_interleaved_and_have_rows_that_the_model_draws(pair_folders, spied):
    """A slow moment must meet all sizes alike. Equal rows would choose the same experts, and hide those of others."""
    runner = LLM(str(pair_folders[0])).engine.runner
    seen = spied(runner, "forward", lambda seqs, draft, *_: draft.tokens.tolist())
    curve = measure_curve(runner, seconds=60.0, rows=(1, 4, 16), longest=0)
    assert [1 + len(tokens) for tokens in seen] == [1, 1, 4, 4, 16, 16] + [1, 4, 16] * 3 and curve.rows == [1, 4, 16]
    assert all(len(set(tokens)) > 4 for tokens in seen[5::3])
