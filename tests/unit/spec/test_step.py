"""decode_step: draft, verify, keep; the rows that stay in the cache are those of a fresh prefill."""

from __future__ import annotations

from typing import Any

import torch
from lawkit import Pair, make_engine

from sameseed import LLM
from sameseed.drafters._chains import ChainDrafter
from sameseed.request import FinishReason, SamplingParams, Sequence, TimeSplit
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, NoDrafter, Span
from sameseed.spec.step import decode_step


class Recorder(Drafter):
    """Drafts one fixed chain and records what it is told."""

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


def test_nothing_is_checked_after_a_token_that_ends_the_text(pair: Pair) -> None:
    engine = make_engine(pair)
    runner = engine.runner
    eos = runner.model.config.eos_token_ids[0]
    settings = [SamplingParams(), SamplingParams(ignore_eos=True), SamplingParams(stop_token_ids=(8,))]
    seqs = [Sequence(i, [5, 6, 7], params, 0) for i, params in enumerate(settings)]
    for seq in seqs:
        runner.blocks.reserve(seq, 40)
    draft, _ = decode_step(runner, Recorder([8, eos, 9, 10]), seqs, [3, 3, 3], [4, 4, 4])
    assert [draft.nodes(b)[0] for b in range(3)] == [[8, eos], [8, eos, 9, 10], [8]]


def test_a_chain_ends_with_its_text() -> None:
    """The embedded draft writes the end of an answer, and no pass of it follows."""
    llm = LLM("embedded", draft="embedded-draft", num_draft_tokens=24, policy="fixed")
    passes: list[int] = []
    drafter = llm.engine.drafter
    assert isinstance(drafter, ChainDrafter)
    forward = drafter.runner.forward
    drafter.runner.forward = lambda *args, **more: (passes.append(1), forward(*args, **more))[1]  # type: ignore[method-assign]
    done = llm.chat([{"role": "user", "content": "What is 23 + 45?"}], SamplingParams(max_tokens=200))
    assert done.finish_reason is FinishReason.STOP
    assert len(passes) <= len(done.token_ids) + 2 * done.metrics.spec.num_rounds
