"""A round: drafts and their trees, the walk of verify, and the step that joins them."""

import math
import time

import pytest
import torch
from fixtures_device import pretended_device
from lawkit import make_engine

from sameseed.errors import ConfigError
from sameseed.request import SamplingParams, Sequence, SpecMetrics, TimeSplit
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter
from sameseed.spec.sampling import FAILED, drawable, drawer, noise_key
from sameseed.spec.step import decode_step
from sameseed.spec.verify import Verified, on_host, verify


def test_levels_stay_with_their_nodes():
    draft = Draft.trees([([4, 5, 6], [-1, 0, -1]), ([7], [-1])], levels=[[2, 1, 0], [1]])
    assert draft.useful([1, 1], [set(), set()]).node_levels(0) == [2, 0]
    assert draft.useful([1, 0], [set(), set()]).node_levels(1) == []


def test_limits():
    Draft.trees([([1] * 64, [-1] * 64)])
    with pytest.raises(ConfigError, match="65 nodes; at most 64"):
        Draft.chains([[1] * 65])
    for parents in ([0], [-1, 1], [-1, 2, 0], [-2]):
        with pytest.raises(ConfigError, match="parents must come before"):
            Draft.trees([([1] * len(parents), parents)])


def test_nothing_follows_a_token_that_ends_a_text():
    draft = Draft.trees(
        [([5, 2, 6, 7], [-1, 0, 0, 1]), ([5, 2, 6], [-1, 0, 1])], [[0.9, 0.5, 0.4, 0.3], [0.9, 0.8, 0.7]]
    )
    cut = draft.useful([9, 9], [{2}, set()])
    assert [cut.nodes(b) for b in range(2)] == [([5, 2, 6], [-1, 0, 0]), ([5, 2, 6], [-1, 0, 1])]
    assert cut.confidence is not None and cut.confidence.tolist() == pytest.approx([0.9, 0.5, 0.4, 0.9, 0.8, 0.7])
    assert draft.useful([9, 9], [{9}, {8}]) is draft


V = 10


def after(*choices):
    """Logits [R, V] whose argmax is choices[r] in row r."""
    return torch.nn.functional.one_hot(torch.tensor(choices), V).float()


def check(draft, logits, params=None):
    seqs = [Sequence(b, [1], params or SamplingParams(), 0) for b in range(draft.num_seqs)]
    return verify(draft, logits, seqs, [True] * draft.num_seqs)


def test_tree_follows_the_child_that_carries_the_choice():
    #            root -> 4 (0) -> 6 (2) -> 8 (4)
    #                  \ 5 (1) -> 6 (3) -> 9 (5)
    draft = Draft.trees([([4, 5, 6, 6, 8, 9], [-1, -1, 0, 1, 2, 3])])
    result = check(draft, after(5, 0, 6, 0, 9, 0, 7))
    assert result.tokens == [[5, 6, 9, 7]]
    assert result.nodes == [[1, 3, 5]]
    assert check(draft, after(4, 6, 0, 2, 0, 0, 0)).nodes == [[0, 2]]
    assert check(draft, after(8, 6, 0, 2, 0, 0, 0)).tokens == [[8]], "a grandchild is no child"


def test_of_duplicate_siblings_the_first_is_followed():
    draft = Draft.trees([([4, 4, 5, 6], [-1, -1, 0, 1])])
    # Both twins have the same logits, since their prefixes are equal. Their children differ.
    assert check(draft, after(4, 5, 5, 7, 8)).nodes == [[0, 2]]
    assert check(draft, after(4, 6, 6, 7, 8)) == Verified([[4, 6]], [[0]], [[]], [False])


def test_scripted_tokens_are_taken_whatever_the_logits_say():
    seq = Sequence(0, [1], SamplingParams(), 0, script=(1, 4, 5))
    assert verify(Draft.chains([[4, 5]]), after(9, 9, 7), [seq], [True]).tokens == [[4, 5, 7]]


def test_failure_keeps_what_was_accepted_before():
    logits = after(4, 5, 6, 7)
    for params in (SamplingParams(), SamplingParams(temperature=0.001), SamplingParams(frequency_penalty=0.1)):
        bad = logits.clone()
        bad[2, 3] = math.nan
        result = check(Draft.chains([[4, 5, 6]]), bad, params)
        assert result.tokens == [[4, 5]]
        assert result.nodes == [[0, 1]]
        assert result.failed == [True]
        bad[0] = -math.inf
        result = check(Draft.chains([[4, 5, 6]]), bad, params)
        assert (result.tokens, result.nodes, result.failed) == ([[]], [[]], [True])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("params", [{}, {"logit_bias": {3: 1.0}}, {"banned_token_ids": (1,)}])
def test_whose_fault_it_is_that_no_token_is_left(params, temperature):
    """Logits of NaN or infinity are not the request's fault, whatever its bans and biases."""
    for bad in (math.nan, math.inf, -math.inf):
        logits = after(4) * 0 + bad
        seq = Sequence(0, [1], SamplingParams(temperature=temperature, **params), 0)
        assert verify(Draft.empty(1), logits, [seq], [True]).failed == [True] and not seq.ruled_out
    seq = Sequence(0, [1], SamplingParams(temperature=temperature, banned_token_ids=tuple(range(V))), 0)
    assert verify(Draft.empty(1), after(4), [seq], [True]).failed == [True] and seq.ruled_out


def test_counters_of_several_runs_add_up():
    one, other = SpecMetrics(), SpecMetrics()
    one.update(3, 1)
    other.update(6, 5)
    other.add(one)
    assert other == SpecMetrics(2, 2, 9, 6, [2, 1, 1, 1, 1], 2)


def test_logprobs_go_with_the_tokens():
    result = check(Draft.chains([[4, 5]]), after(4, 9, 0), SamplingParams(logprobs=2))
    assert [x.token_id for x in result.logprobs[0]] == [4, 9]
    likely = 1.0 - math.log(math.e + V - 1)
    assert [x.logprob for x in result.logprobs[0]] == pytest.approx([likely, likely])
    assert check(Draft.chains([[4, 5]]), after(4, 9, 0)).logprobs == [[]]


@pytest.mark.parametrize("bias", [{}, {1: -9.0}])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_first_of_equals_is_chosen(rows, bias):
    """Tokens 2 i and 2 i + 1 have equal logits, for one row as for several; biases take another way."""
    logits = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1)).repeat_interleave(2, dim=1)
    seqs = [Sequence(b, [1], SamplingParams(logit_bias=bias), 0) for b in range(rows)]
    found = verify(Draft.chains([[]] * rows), logits, seqs, [True] * rows)
    assert found.tokens == [[2 * i] for i in logits[:, ::2].argmax(dim=1).tolist()]


def test_choices_that_are_made_need_no_logits():
    """A backend's choices are used for drawable requests; only the logits of the others come to the CPU."""
    draft = Draft.chains([[4, 5], [6, 7]])
    seqs = [Sequence(0, [1], SamplingParams(), 0), Sequence(1, [1], SamplingParams(logprobs=0), 0)]
    rows = after(1, 1, 1, 6, 7, 3)
    with pretended_device() as name:
        there = rows.to(name)
        result = verify(draft, there, seqs, [True, True], (), [4, 5, 2, 0, 0, 0])
        assert result.tokens == [[4, 5, 2], [6, 7, 3]] and result.nodes == [[0, 1], [0, 1]]
        assert on_host(there, draft, [True, True], [True, False])[3:].tolist() == rows[3:].tolist()
        assert on_host(there, draft, [True, True], [True, True]).shape == (6, 0)
        failed = verify(draft, there, seqs[:1], [True], (), [4, FAILED, 2])
        assert failed.tokens == [[4]] and failed.failed == [True] and not seqs[0].ruled_out


def test_the_request_alone_decides_who_chooses():
    for more in ({}, {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, {"stop_token_ids": (3,)}):
        assert drawable(Sequence(0, [1], SamplingParams(**more), 0))
    for more in (
        {"logprobs": 0}, {"min_tokens": 1}, {"presence_penalty": 0.1}, {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1}, {"logit_bias": {1: 1.0}}, {"banned_token_ids": (1,)}, {"allowed_token_ids": (1,)},
    ):  # fmt: skip
        seq = Sequence(0, [1, 2], SamplingParams(**more), 0)
        assert not drawable(seq) and drawer(seq, 0) is None
    assert not drawable(Sequence(0, [1], SamplingParams(), 0, script=(1, 2)))
    seq = Sequence(0, [1, 2], SamplingParams(temperature=0.5, min_p=0.1), 9)
    assert drawer(seq, 3) == (noise_key(9, 5), 0.5, math.log(0.1), False, 0, 1.0)


class Fixed(Drafter):
    """Drafts one fixed chain."""

    def __init__(self, chain):
        self.chain = chain

    def propose(self, seqs, num_draft):
        return Draft.chains([self.chain[:k] for k in num_draft])


def test_what_a_drafter_reads_is_time_of_drafting(pair):
    engine, times = make_engine(pair), TimeSplit()
    seq, drafter = Sequence(0, [5, 6, 7], SamplingParams(), 0), Fixed([8])
    engine.runner.blocks.reserve(seq, 9)
    drafter.observe = lambda *_: time.sleep(0.1)
    decode_step(engine.runner, drafter, [seq], [3], [1], times)
    assert times.draft >= 0.1


def test_nothing_is_checked_after_a_token_that_ends_the_text(pair):
    engine = make_engine(pair)
    runner = engine.runner
    eos = runner.model.config.eos_token_ids[0]
    settings = [SamplingParams(), SamplingParams(ignore_eos=True), SamplingParams(stop_token_ids=(8,))]
    seqs = [Sequence(i, [5, 6, 7], params, 0) for i, params in enumerate(settings)]
    for seq in seqs:
        runner.blocks.reserve(seq, 40)
    draft, _ = decode_step(runner, Fixed([8, eos, 9, 10]), seqs, [3, 3, 3], [4, 4, 4])
    assert [draft.nodes(b)[0] for b in range(3)] == [[8, eos], [8, eos, 9, 10], [8]]
