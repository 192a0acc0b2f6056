"""Log-probabilities of a prompt's own tokens, and requests that fail alone, also where memory runs out."""

from dataclasses import dataclass, field, replace

import lawkit
import pytest
import torch
from lawkit import SAMPLED, TreeDrafter, assert_nothing_left, finished, knowing, make_engine, random_prompts, run, texts

from sameseed.grammar import Choice, Vocabulary
from sameseed.request import FinishReason, Request, SamplingParams
from sameseed.spec import verify as verify_module
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter

PROMPT = tuple(range(1, 151))
PROMPTS = random_prompts(4, seed=8, longest=20)
OTHER = (5, 6, 7, 5, 6, 7, 5)
ASKED = SamplingParams(
    max_tokens=12, seed=3, logprobs=2, ignore_eos=True, min_tokens=4, repetition_penalty=1.1, **SAMPLED
)
FREE = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_scored_prompt_is_continued_as_ever_after_a_preemption(reference_pair):
    done, asked = [], replace(ASKED, banned_token_ids=(5,), allowed_token_ids=tuple(range(1, lawkit.MODEL_VOCAB, 2)))
    for scores in (False, True):
        engine = make_engine(reference_pair, "draft_model", rows=70, tokens=256)  # room for one sequence
        for name, prompt in (("r0", PROMPT), ("r1", OTHER), ("r2", PROMPT[::-1])):
            engine.add(Request(name, prompt, asked, 3, score_prompt=scores))
        done.append(finished(engine))
        assert engine.scheduler.num_preemptions
        assert_nothing_left(engine)
    for key, scored in done[1].items():
        assert (scored.token_ids, scored.logprobs) == (done[0][key].token_ids, done[0][key].logprobs)
        assert [p.token_id for p in scored.prompt_logprobs] == list(scored.prompt_token_ids[1:])
        assert min(p.logprob for p in scored.prompt_logprobs) > -1e3, "these restrict what is written"


@pytest.mark.parametrize("method", ["none", "suffix"])
def test_no_error_comes_from_beyond_the_end_of_a_text(method, pair):
    """The choice after an accepted stop token is none of the text's: here the grammar would rule out all tokens."""
    one, two = 1, 2
    size = pair.target.config.vocab_size
    letters = Vocabulary([{one: b"a", two: b"b"}.get(t, b"c" if t else b"") for t in range(size)], [0])
    params = SamplingParams(max_tokens=9, stop_token_ids=(two,), allowed_token_ids=(one, two))
    engine = make_engine(pair, method)
    engine.add(Request("r", (one, one, two) * 6 + (one,), params, 3, grammar=Choice(["aab"], letters)))
    done = finished(engine)["r", 0]
    assert (done.token_ids, done.finish_reason) == ((one, one, two), FinishReason.STOP)
    assert (done.error, done.ruled_out) == ("", False)


@pytest.mark.failing_drafter
def test_one_that_fails_in_the_sampler_ends_alone(pair, monkeypatch):
    alone = run(make_engine(pair, "ngram"), [OTHER], ASKED)[0]
    engine = make_engine(pair, "ngram")
    choose = verify_module.choose

    def poisoned(logits, seq, path, eos):
        if seq.num_prompt == 3 and len(seq) > 6:
            raise IndexError("poison")
        return choose(logits, seq, path, eos)

    monkeypatch.setattr(verify_module, "choose", poisoned)
    bad, good = run(engine, [(1, 2, 3), OTHER], ASKED)
    assert bad.finish_reason is FinishReason.ERROR
    assert len(bad.token_ids) < 12
    assert good.token_ids == alone.token_ids and good.logprobs == alone.logprobs


@pytest.mark.failing_drafter
def test_a_failing_drafter_costs_no_text(pair):
    class Broken(Drafter):
        rounds = 0

        def propose(self, seqs, num_draft):
            raise ValueError("no guess")

        def observe(self, seqs, spans, hidden):
            self.rounds += 1
            raise ValueError("no memory")

    drafter = Broken()
    plain = run(make_engine(pair), [OTHER, PROMPT], ASKED)
    drafted = run(make_engine(pair, drafter=drafter), [OTHER, PROMPT], ASKED)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert drafter.rounds > 5


WRONG = {
    "more tokens than asked for": lambda num_draft: [[1] * (k + 20) for k in num_draft],
    "an unknown token": lambda num_draft: [[10**6] * k for k in num_draft],
    "a negative token": lambda num_draft: [[-1] * k for k in num_draft],
    "fewer sequences": lambda num_draft: [[1] * k for k in num_draft[1:]],
}


@pytest.mark.failing_drafter
@pytest.mark.parametrize("chains", WRONG.values(), ids=WRONG)
def test_a_drafter_that_breaks_its_contract_costs_no_text(chains, pair):
    @dataclass
    class Wrong(Drafter):  # which cannot be hashed
        seen: dict = field(default_factory=dict)

        def propose(self, seqs, num_draft):
            return Draft.chains(chains(num_draft))

        def release(self, seq):
            del self.seen[seq.seq_id]

    plain = run(make_engine(pair), [OTHER, PROMPT], ASKED)
    engine = make_engine(pair, drafter=Wrong())
    drafted = run(engine, [OTHER, PROMPT], ASKED)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert_nothing_left(engine)


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
            assert engine.fail_step(RuntimeError("it failed")) == []
        done |= {d.request_id: d.completion for d in deltas if d.completion is not None}
    return done, failed


@pytest.mark.parametrize(("op", "at"), [("attention", 5), ("product", 7), ("move_kv", 1), ("move_kv", 2)])
def test_requests_of_the_pass_fail_and_the_engine_lives(reference_pair, op, at, monkeypatch):
    """Memory runs out in the middle of a pass, or between layers while accepted rows are moved."""
    pair = reference_pair
    wanted = texts(run(make_engine(pair), PROMPTS, FREE))
    trees = TreeDrafter(knowing(PROMPTS, wanted), pair.target.config.vocab_size, seed=2)
    engine = make_engine(pair, k=12, drafter=trees, seqs=2)
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(f"r{i}", tuple(prompt), FREE, 3))
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
    assert texts(run(engine, PROMPTS, FREE)) == wanted, "and with all of its memory"


def bound(op):
    """A callable object as a method of a class."""
    return lambda self, *args, **kwargs: op(self, *args, **kwargs)
