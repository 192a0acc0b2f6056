"""Log-probabilities of a prompt's own tokens, and requests that fail alone."""

from dataclasses import dataclass, field, replace

import pytest
from lawkit import SAMPLED, assert_nothing_left, finished, make_engine, run

from sameseed.grammar import Choice, Vocabulary
from sameseed.request import FinishReason, Request, SamplingParams
from sameseed.spec import verify as verify_module
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter

PROMPT = tuple(range(1, 151))
OTHER = (5, 6, 7, 5, 6, 7, 5)
ASKED = SamplingParams(
    max_tokens=12, seed=3, logprobs=2, ignore_eos=True, min_tokens=4, repetition_penalty=1.1, **SAMPLED
)


def score(engine, prompts, params):
    """Completions of scored prompts that run together."""
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"r{i}", prompt, params, 3, score_prompt=True))
    done = finished(engine)
    assert_nothing_left(engine)
    return [done[f"r{i}", 0] for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("method", "rows", "tokens"), [("none", 512, 4096), ("ngram", 9, 4096), ("draft_model", 70, 320)]
)
def test_a_scored_prompt_is_continued_as_ever(reference_pair, method, rows, tokens):
    """For several drafters, rows per pass, and with preemptions (the last case's cache holds one sequence)."""
    plain = run(make_engine(reference_pair), [PROMPT, OTHER], ASKED, alone=True)
    engine = make_engine(reference_pair, method, rows=rows, tokens=tokens)
    scored = score(engine, [PROMPT, OTHER, PROMPT], ASKED)
    for mine, alone in zip(scored, [*plain, plain[0]], strict=True):
        assert mine.token_ids == alone.token_ids
        assert mine.logprobs == alone.logprobs
        assert [p.token_id for p in mine.prompt_logprobs] == list(mine.prompt_token_ids[1:])
    assert scored[0].prompt_logprobs == scored[2].prompt_logprobs


@pytest.mark.parametrize("rows", [512, 9])
def test_what_was_scored_is_the_prompt_to_all_processors(reference_pair, rows):
    """Scored tokens count as prompt for penalties, `min_tokens` and a grammar, in chunks of any size."""
    free = SamplingParams(max_tokens=8, seed=3, logprobs=2, ignore_eos=True)
    first = run(make_engine(reference_pair), [OTHER], free)[0].token_ids[0]
    size = reference_pair.target.config.vocab_size
    letters = Vocabulary([bytes([97 + t % 26]) if t else b"" for t in range(size)], [0])
    for params, grammar in (
        (replace(free, temperature=0.9, presence_penalty=2.0, frequency_penalty=1.0), None),
        (replace(free, ignore_eos=False, min_tokens=3, stop_token_ids=(first,)), None),
        (free, Choice(["abcabc", "zyx"], letters)),
    ):
        done = []
        for scores in (False, True):
            engine = make_engine(reference_pair, rows=rows)
            engine.add(Request("r", OTHER, params, 3, grammar=grammar, score_prompt=scores))
            done.append(finished(engine)["r", 0])
        assert done[0].token_ids == done[1].token_ids
        assert done[0].logprobs == done[1].logprobs


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


def test_scores_are_the_models(reference_pair):
    greedy = SamplingParams(max_tokens=1, seed=3, logprobs=1, ignore_eos=True)
    found = score(make_engine(reference_pair, "ngram"), [PROMPT], greedy)[0].prompt_logprobs
    num_compared = 0
    for n in range(1, 40):  # the model's own logprob of token n, read from the likeliest tokens after the first n
        only = SamplingParams(max_tokens=1, logprobs=100, seed=0, ignore_eos=True)
        top = run(make_engine(reference_pair), [PROMPT[:n]], only)[0].logprobs
        truth = dict(top[0].top)
        assert found[n - 1].top == top[0].top[:1]
        if PROMPT[n] in truth:
            num_compared += 1
            assert found[n - 1].logprob == truth[PROMPT[n]]
    assert num_compared > 5


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


def test_a_failed_pass_ends_those_in_it(pair, monkeypatch):
    alone = run(make_engine(pair), [OTHER], ASKED)[0]
    engine = make_engine(pair, seqs=1)
    for name in ("first", "second"):
        engine.add(Request(name, OTHER, ASKED, 3))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.model, "run", None)
        with pytest.raises(TypeError):
            engine.step()
    ended = engine.fail_step(RuntimeError("it failed"))
    assert [d.request_id for d in ended] == ["first"]
    assert ended[0].completion is not None and ended[0].completion.finish_reason is FinishReason.ERROR
    assert engine.fail_step(RuntimeError("it failed")) == []
    last = None
    while engine.has_work:
        last = engine.step()[-1].completion
    assert last is not None and last.token_ids == alone.token_ids
    assert_nothing_left(engine)
