"""Length policies: how many tokens a draft may have, and when a draft ends early."""

from __future__ import annotations

import pytest

from sameseed.config import SpecConfig
from sameseed.engine.policies import make_policy
from sameseed.errors import ConfigError
from sameseed.lengths.confidence import ConfidenceLength
from sameseed.lengths.fixed import FixedLength
from sameseed.lengths.history import HistoryLength
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.drafter import LengthPolicy, Round

SEQS = [Sequence(b, [1], SamplingParams(), 0) for b in range(3)]


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        (SpecConfig(), FixedLength(0)),
        (SpecConfig("ngram", num_draft_tokens=6), FixedLength(6)),
        (SpecConfig("draft_model", num_draft_tokens=7, confidence=0.4), ConfidenceLength(7, 0.4)),
        (SpecConfig("ngram", num_draft_tokens=6, policy="history"), HistoryLength(6)),
        (SpecConfig("none", num_draft_tokens=7, confidence=0.4), FixedLength(0)),
    ],
)
def test_make_policy(spec: SpecConfig, policy: LengthPolicy) -> None:
    assert make_policy(spec) == policy


def test_history_grows_after_right_drafts_and_shrinks_after_others() -> None:
    policy = HistoryLength(8)
    assert not policy.uses_confidence and policy.least_probability == 0.0
    asked = policy.lengths(SEQS)
    assert asked == [4, 4, 4]
    policy.update(Round(SEQS, asked, [4, 4, 0], [4, 3, 0]))
    assert policy.lengths(SEQS) == [6, 3, 4], "one that had no guess shows nothing"
    for _ in range(9):
        asked = policy.lengths(SEQS)
        policy.update(Round(SEQS, asked, asked, [asked[0], 0, 0]))
    assert policy.lengths(SEQS) == [8, 1, 1]
    policy.release(SEQS[0])
    assert policy.lengths(SEQS) == [4, 1, 1]
    assert HistoryLength(2).lengths(SEQS) == [2, 2, 2]
    assert HistoryLength(2, 0.3).least_probability == 0.3


def test_a_policy_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="confidence, disco, fixed, goodput, history"):
        SpecConfig("ngram", policy="historic")
