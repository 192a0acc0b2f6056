"""Engine: where a text ends, what a completion contains, which requests are refused."""

import json
import math
from dataclasses import replace

import pytest
from lawkit import MAX_LEN, SAMPLED, TreeDrafter, finished, make_engine, random_prompts, run, texts

from sameseed.errors import RequestError
from sameseed.request import FinishReason, Request, SamplingParams, Speculation

PROMPT = random_prompts(4)[3]


class Oracle(TreeDrafter):
    """A drafter that is always right: it proposes the known answer as a chain."""

    def _tree(self, seq, num_draft):
        right = list(self.answer(seq))[:num_draft]
        return right, list(range(-1, len(right) - 1))


def oracle_engine(pair, answer, k=8, **settings):
    return make_engine(pair, k=k, drafter=Oracle(lambda seq: answer[seq.num_output :], MAX_LEN), **settings)


def answer_of(pair, **params):
    asked = SamplingParams(max_tokens=40, seed=2, ignore_eos=True, **params)
    return texts(run(make_engine(pair), [PROMPT], asked))[0]


def test_the_context_ends_the_text(pair):
    for spec in ({}, {"method": "draft_model", "k": 6}):
        engine = make_engine(pair, **spec, max_len=40)
        params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
        first, second = run(engine, [PROMPT[:10], list(range(1, 40))], params)
        assert (len(first.token_ids), len(second.token_ids)) == (30, 1)
        assert first.finish_reason is second.finish_reason is FinishReason.LENGTH


def test_counters_add_up(pair):
    engine = make_engine(pair, "draft_model", k=4)
    prompts = random_prompts(6)
    done = run(engine, prompts, SamplingParams(max_tokens=25, seed=1, ignore_eos=True, **SAMPLED))
    for c in done:
        spec = c.metrics.spec
        assert c.metrics.num_output_tokens == len(c.token_ids) == len(c.accepted) == 25
        assert c.metrics.num_prompt_tokens == len(c.prompt_token_ids)
        assert sum(c.accepted) == spec.num_accepted_tokens
        assert len(c.token_ids) == spec.num_rounds + spec.num_accepted_tokens, "one a round, and what was accepted"
        assert not c.accepted[0], "the first token comes from the prompt's pass"
        assert spec.num_accepted_tokens_per_pos == sorted(spec.num_accepted_tokens_per_pos, reverse=True)
        assert sum(spec.num_accepted_tokens_per_pos) == spec.num_accepted_tokens
        assert spec.num_rollbacks <= spec.num_drafts < spec.num_rounds
        assert 0 < c.metrics.time_to_first_token < c.metrics.total_time
        assert c.metrics.time_per_output_token > 0
        split = c.metrics.time_split
        assert min(split.draft, split.target, split.verify, split.schedule) > 0
        assert split.draft + split.target + split.verify + split.schedule <= c.metrics.total_time
        plain = json.loads(json.dumps(c.metrics.as_dict()))
        assert plain["acceptance_rate"] == spec.num_accepted_tokens / spec.num_draft_tokens
        assert plain["mean_acceptance_length"] == 1 + spec.num_accepted_tokens / spec.num_drafts
    for name in ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_rollbacks"):
        assert getattr(engine.metrics, name) == sum(getattr(c.metrics.spec, name) for c in done)


@pytest.mark.parametrize("k", [0, 2])
def test_a_wish_for_longer_drafts_than_the_engine_makes_by_goodput(pair, k):
    asked = SamplingParams(max_tokens=30, seed=2, ignore_eos=True)
    plain = texts(run(make_engine(pair), [PROMPT], asked))
    engine = make_engine(pair, "draft_model", k=k, policy="goodput")
    for i, wish in enumerate((Speculation("fixed", 16), None)):
        engine.add(Request(f"r{i}", tuple(PROMPT), asked, 2, speculation=wish))
    done = finished(engine).values()
    assert texts(done) == plain * 2
    longest = max(c.metrics.spec.num_draft_tokens / max(1, c.metrics.spec.num_drafts) for c in done)
    assert longest > 2, "the wish was heeded"


def test_what_cannot_be_served(pair):
    engine = make_engine(pair, max_len=50)
    cases = [
        ((), "prompt is empty"), (tuple([1] * 50), "50 tokens and the context holds 50"),
        ((1, 304), r"prompt: .* 0\.\.303"), ((-1,), "prompt: token ids"),
    ]  # fmt: skip
    for prompt, message in cases:
        with pytest.raises(RequestError, match=message):
            engine.add(Request("r", prompt, SamplingParams(), 0))
    beyond = {"logit_bias": {304: 1.0}, "max_tokens": 129}
    beyond |= dict.fromkeys(("allowed_token_ids", "banned_token_ids", "stop_token_ids"), (304,))
    for name, value in beyond.items():
        with pytest.raises(RequestError) as caught:
            engine.add(Request("r", (1,), SamplingParams(**{name: value}), 0))
        assert caught.value.field == name
    assert not engine.has_work
    assert engine.step() == []


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_logits_that_are_no_numbers_end_with_an_error(pair, monkeypatch, sampling):
    """Tokens accepted before the NaN row are kept; the other sequences go on."""
    answer = answer_of(pair, **sampling)
    engine = oracle_engine(pair, answer, k=4)
    forward, calls = engine.runner.forward, []

    def poisoned(seqs, draft, num_pending, *more, **named):
        out = forward(seqs, draft, num_pending, *more, **named)
        calls.append(1)
        if len(calls) == 3:
            logits = out.logits.clone()
            logits[2] = math.nan  # after the second drafted token of the first sequence
            return replace(out, logits=logits)
        return out

    monkeypatch.setattr(engine.runner, "forward", poisoned)
    params = SamplingParams(max_tokens=20, seed=2, ignore_eos=True, **sampling)
    first, second = run(engine, [PROMPT, PROMPT], params)
    assert first.finish_reason is FinishReason.ERROR
    assert first.token_ids == answer[: 1 + 5 + 2]
    assert second.token_ids == answer[:20]
