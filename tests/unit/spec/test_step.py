"""decode_step: guess, check, keep; what stays in the cache is what a fresh prefill would have put there."""

from __future__ import annotations

from typing import Any

import torch
from lawkit import Pair, make_engine

from sameseed.request import SamplingParams, Sequence, TimeSplit
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, NoDrafter, Span
from sameseed.spec.step import decode_step


class Recorder(Drafter):
    """Guesses one fixed chain and writes down what it is told."""

    captures = (0, 1)

    def __init__(self, chain: list[int]) -> None:
        self.chain = chain
        self.asked: list[list[int]] = []
        self.seen: list[tuple[list[Span], Any]] = []

    def propose(self, seqs: Any, num_draft: Any) -> Draft:
        self.asked.append(list(num_draft))
        return Draft.chains([self.chain[:k] for k in num_draft])

    def observe(self, seqs: Any, spans: Any, hidden: Any) -> None:
        self.seen.append((list(spans), hidden))


def test_observe_tells_what_became_certain(pair: Pair) -> None:
    engine = make_engine(pair)
    runner = engine.runner
    truth = Sequence(0, [5, 6, 7], SamplingParams(), 0)
    runner.blocks.reserve(truth, 40)
    while truth.num_output < 4:
        decode_step(runner, NoDrafter(), [truth], [truth.num_pending], [0])
    first, second, third = truth.output_token_ids[:3]
    drafter = Recorder([second, third, (truth.output_token_ids[3] + 1) % 300])
    runner.captures = drafter.captures
    seqs = [Sequence(1, [5, 6, 7], SamplingParams(), 0), Sequence(2, [9] * 10, SamplingParams(), 0)]
    for seq in seqs:
        runner.blocks.reserve(seq, 40)
    times = TimeSplit()
    decode_step(runner, drafter, seqs, [3, 4], [0, 0], times)
    assert drafter.asked == [], "nothing to draft: the drafter is not asked"
    assert seqs[0].token_ids == [5, 6, 7, first]
    assert seqs[1].num_output == 0, "a chunk decides nothing"
    draft, result = decode_step(runner, drafter, seqs, [1, 4], [3, 0], times)
    assert draft.offsets.tolist() == [0, 3, 3]
    assert result.tokens == [[second, third, truth.output_token_ids[3]], []]
    assert result.nodes == [[0, 1], []]
    assert drafter.asked == [[3, 0]]
    assert drafter.seen[0][0] == [Span(0, 3), Span(0, 4)]
    assert drafter.seen[1][0] == [Span(3, 6, 3), Span(4, 8, 0)]
    width = 2 * pair.target.config.hidden_size
    assert [h.shape for _, h in drafter.seen] == [(7, width), (7, width)]
    assert [seq.num_cached for seq in seqs] == [6, 8]
    assert min(times.draft, times.target, times.verify) > 0
    # The hidden states of accepted rows are those of a prefill.
    fresh = Sequence(3, seqs[0].token_ids[:6], SamplingParams(), 0)
    runner.blocks.reserve(fresh, 6)
    decode_step(runner, drafter, [fresh], [6], [0])
    whole = drafter.seen[-1][1]
    assert torch.equal(whole[3:], drafter.seen[1][1][:3])


def test_plain_decoding_is_an_empty_draft(pair: Pair) -> None:
    assert NoDrafter().propose([Sequence(0, [1], SamplingParams(), 0)] * 3, [4, 4, 4]).offsets.tolist() == [0] * 4
