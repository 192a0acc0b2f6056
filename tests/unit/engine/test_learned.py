"""What goodput learned is used by the next process: costs rescaled to today's speed, acceptance rates in part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sameseed import store
from sameseed.config import SpecConfig
from sameseed.cost.curve import Curve
from sameseed.cost.running import EngineCost
from sameseed.engine.learned import FIRST, KIND, LearnedTable
from sameseed.engine.llm import LLM
from sameseed.lengths._acceptance import KEPT, Acceptance, DraftNodes
from sameseed.lengths.goodput import GoodputLength
from sameseed.request import SamplingParams


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / KIND


def policy_that_knows() -> GoodputLength:
    policy = GoodputLength(4, Curve([(1, 0.1), (8, 0.2)], 64, 1e-6, 1e-7))
    assert policy.cost is not None
    for n in range(20):
        policy.cost.draft.learn(n % 4, 2, 100.0, 0.01 + 0.002 * (n % 4))
        policy.cost.gap.correct(2.0 + n % 3, n % 2 == 1, 0.001 * (1 + n % 2))
        policy.acceptance.learn(7, 4, DraftNodes(range(-1, 3), None, policy.acceptance.rates(7)), range(n % 5))
    policy.cost.ratios = {(True, 1): 1.1, (False, 3): 0.9}
    return policy


def kept(policy: GoodputLength, key: str = "key") -> None:
    table = LearnedTable(policy, key)
    for _ in range(FIRST):
        table.passed()


def begun(key: str = "key") -> tuple[GoodputLength, bool]:
    """A policy that took over a table, and whether it was measured anew."""
    policy, measured = GoodputLength(4), EngineCost(Curve([(1, 9.0)]))
    LearnedTable(policy, key).begin(lambda: measured)
    return policy, policy.cost is measured


def test_a_table_comes_back() -> None:
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


def test_scaled_costs_are_those_of_a_slower_machine() -> None:
    policy = policy_that_knows()
    assert policy.cost is not None
    curve, draft, gap = policy.cost.target.at(8), policy.cost.draft.terms(2, 100.0), policy.cost.gap.at(2, True)
    policy.cost.scale(2.0)
    assert policy.cost.target.at(8) == pytest.approx(2 * curve)
    assert policy.cost.draft.terms(2, 100.0) == pytest.approx([2 * s for s in draft])
    assert policy.cost.gap.at(2, True) == gap, "Python is no slower where memory is"


def test_what_was_measured_is_not_measured_at_the_next_start(cache: Path) -> None:
    assert begun()[1] and len(list(cache.glob("*.npz"))) == 1
    policy, measured = begun()
    assert not measured and policy.cost is not None and policy.cost.target.at(1) == 9.0


def test_what_is_broken_is_measured_again(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(policy_that_knows())
    (cache / "key.npz").write_bytes(b"no table")
    policy, measured = begun()
    assert measured and "broken" in caplog.text and policy.cost is not None and policy.cost.target.at(1) == 9.0


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e300])
def test_what_a_glitch_of_the_clock_wrote_is_measured_again(value: float, cache: Path) -> None:
    """The file is whole and its digest right: the numbers themselves cannot be of an engine."""
    kept(policy_that_knows())
    found = store.read(KIND, "key")
    assert found is not None
    store.write(KIND, "key", found | {"target": np.full_like(found["target"], value)})
    policy, measured = begun()
    assert measured and policy.cost is not None and policy.cost.target.at(1) == 9.0


def test_an_engine_begins_with_what_the_last_one_learned(pair_folders: tuple[Path, Path], cache: Path) -> None:
    target, draft = map(str, pair_folders)
    params = SamplingParams(max_tokens=2 * FIRST + 80, ignore_eos=True)
    texts = []
    for _ in range(2):
        llm = LLM(target, draft=draft, num_draft_tokens=1)
        policy = llm.engine.policy
        assert isinstance(policy, GoodputLength)
        texts.append((len(list(cache.glob("*.npz"))), llm.generate([[5, 6, 7]], params)[0].token_ids))
    assert [count for count, _ in texts] == [1, 1] and texts[0][1] == texts[1][1]
    LLM(target, draft=draft, num_draft_tokens=2).generate([[5, 6, 7]], params)
    assert len(list(cache.glob("*.npz"))) == 2, "another length is another table"


def test_a_drafter_without_a_name_keeps_nothing(pair_folders: tuple[Path, Path], cache: Path) -> None:
    from sameseed.drafters.ngram import DRAFTER

    LLM(str(pair_folders[0]), draft=DRAFTER, num_draft_tokens=2).generate(
        [[5, 6, 7]], SamplingParams(max_tokens=3 * FIRST, ignore_eos=True)
    )
    assert not cache.exists()
    assert SpecConfig().drafter is None and Acceptance(4).as_arrays()["kinds"].sum() == 0.0
