"""Length policies by name, the history of right drafts, and disco."""

import pytest

from sameseed.config import SpecConfig
from sameseed.engine.policies import make_policy
from sameseed.errors import ConfigError
from sameseed.lengths._budget import FIRST_WAIT, Budget
from sameseed.lengths.confidence import ConfidenceLength
from sameseed.lengths.disco import DiscoLength
from sameseed.lengths.fixed import FixedLength
from sameseed.lengths.history import HistoryLength
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Round

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
def test_make_policy(spec, policy):
    assert make_policy(spec) == policy


def test_history_grows_after_right_drafts_and_shrinks_after_others():
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


def test_a_policy_that_is_not_there():
    with pytest.raises(ConfigError, match="confidence, disco, fixed, goodput, history"):
        SpecConfig("ngram", policy="historic")


DISCO_SEQS = [Sequence(b, [1], SamplingParams(), 0) for b in range(2)]
CHAIN = [[0.9, 0.72, 0.36, 0.18, 0.09]]  # probabilities of whole paths


def teach(policy, accepted, rounds=60):
    """Rounds of one sequence in which `accepted` of CHAIN's tokens are right."""
    for _ in range(rounds):
        draft = Draft.chains([[5] * 5], CHAIN)
        kept = policy.trim(draft, DISCO_SEQS[:1], 1)
        policy.update(Round(DISCO_SEQS[:1], [5], [kept.count(0)], [min(accepted, kept.count(0))]))


def test_what_was_right_decides():
    sure, unsure = DiscoLength(8), DiscoLength(8)
    assert sure.uses_confidence and sure.lengths(DISCO_SEQS) == [3, 3], "nothing is known: by a guess of each place"
    teach(sure, 5)
    teach(unsure, 0)
    assert not sure.ends(CHAIN) and unsure.ends([CHAIN[0][:1]])
    assert sure.lengths(DISCO_SEQS) == [8, 8], "one that tells ends by itself"
    draft = Draft.chains([[5] * 5], CHAIN)
    assert sure.trim(draft, DISCO_SEQS[:1], 1) is draft
    assert unsure.trim(draft, DISCO_SEQS[:1], 1).count(0) == 1, "the token that ended it stays: it is learned about"


def test_chains_end_together_and_each_is_cut():
    policy = DiscoLength(8)
    low, high = [0.05, 0.04, 0.03], [0.99, 0.98, 0.97]
    assert policy.ends([low]) and not policy.ends([high]) and not policy.ends([low, high])
    draft = Draft.chains([[1, 2, 3], [4, 5, 6]], [low, high])
    assert [policy.trim(draft, DISCO_SEQS, 2).count(b) for b in range(2)] == [1, 3]
    assert policy.trim(draft, DISCO_SEQS, 2, [1]) is draft, "others stay as they are"


def test_a_tree_keeps_its_parents():
    tree = Draft.trees([([1, 2, 3, 4], [-1, -1, 1, 2])], [[0.95, 0.05, 0.04, 0.03]])
    kept = DiscoLength(8).trim(tree, DISCO_SEQS[:1], 1)
    assert kept.nodes(0) == ([1, 2], [-1, -1])


def test_places_are_learned_of_drafters_that_tell_nothing():
    policy = DiscoLength(6)
    for _ in range(60):
        policy.trim(Draft.chains([[1] * 6]), DISCO_SEQS[:1], 1)
        policy.update(Round(DISCO_SEQS[:1], [6], [6], [2]))
    assert policy.lengths(DISCO_SEQS[:1]) == [3], "two are right, and the next one shows when that changes"
    policy.release(DISCO_SEQS[0])
    assert DiscoLength(0).lengths(DISCO_SEQS) == [0, 0]


def test_a_trial_in_vain_doubles_the_wait_for_the_next():
    budget, seq, waits = Budget(), Sequence(0, [1], SamplingParams(), 0), []
    for _ in range(3):
        begun = budget.now
        while budget.next([seq], 0.0) is None:
            budget.passed()
        waits.append(budget.now - begun)
        budget.next([seq], 0.0)  # its second round
        budget.end_trial()
        budget.note(seq, pays=False)
    assert waits == [0, FIRST_WAIT, 2 * FIRST_WAIT]
