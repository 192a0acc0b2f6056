"""Memory runs out during a run: the requests of that pass fail, the engine and all other requests go on."""

import logging

import pytest
import torch
from lawkit import TreeDrafter, assert_nothing_left, knowing, make_engine, random_prompts, run, texts

from sameseed.request import FinishReason, Request, SamplingParams

PROMPTS = random_prompts(4, seed=8, longest=20)
ASKED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Filling:
    """An op that raises out-of-memory at its `at`-th call."""

    def __init__(self, op, at):
        self.op, self.left = op, at

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise FULL
        return self.op(*args, **kwargs)


def drain(engine):
    """Steps as the server's engine process does; returns completions by request id, and the number of failed steps."""
    done = {}
    failed = 0
    while engine.has_work:
        try:
            deltas = engine.step()
        except torch.OutOfMemoryError:
            failed += 1
            deltas = engine.fail_step(RuntimeError("it failed"))
        done |= {d.request_id: d.completion for d in deltas if d.completion is not None}
    return done, failed


@pytest.mark.parametrize(("op", "at"), [("attention", 5), ("product", 7), ("move_kv", 1), ("move_kv", 2)])
def test_requests_of_the_pass_fail_and_the_engine_lives(reference_pair, op, at, monkeypatch):
    """Memory runs out in the middle of a pass, or between layers while accepted rows are moved."""
    pair = reference_pair
    wanted = texts(run(make_engine(pair), PROMPTS, ASKED))
    trees = TreeDrafter(knowing(PROMPTS, wanted), pair.target.config.vocab_size, seed=2)
    engine = make_engine(pair, k=12, drafter=trees, seqs=2)
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(f"r{i}", tuple(prompt), ASKED, 3))
    with monkeypatch.context() as patch:
        patch.setattr(type(pair.target.ops), op, bound(Filling(getattr(type(pair.target.ops), op), at)))
        done, failed = drain(engine)
    assert failed == 1
    ended = [done[f"r{i}"].finish_reason for i in range(4)]
    assert 1 <= ended.count(FinishReason.ERROR) <= 2, "those that ran, not those that waited"
    for i, reason in enumerate(ended):
        if reason is not FinishReason.ERROR:
            assert done[f"r{i}"].token_ids == wanted[i]
    assert_nothing_left(engine)
    assert texts(run(engine, PROMPTS, ASKED)) == wanted, "and with all of its memory"


def bound(op):
    """A callable object as a method of a class."""
    return lambda self, *args, **kwargs: op(self, *args, **kwargs)


@pytest.mark.failing_drafter
@pytest.mark.parametrize("at", [3, 40])
def test_a_draft_that_finds_no_memory_costs_no_text(reference_pair, at, monkeypatch, caplog):
    wanted = texts(run(make_engine(reference_pair), PROMPTS, ASKED))
    engine = make_engine(reference_pair, "draft_model", 3)
    model = reference_pair.draft
    monkeypatch.setattr(model, "_run", Filling(model._run, at // 3))
    with caplog.at_level(logging.ERROR):
        assert texts(run(engine, PROMPTS, ASKED)) == wanted
    assert "the drafter failed" in caplog.text and "out of memory" in caplog.text
    assert engine.metrics.num_accepted_tokens > 0, "it drafts again"
