"""Chains that a model drafts and the target verifies unread by the host: the same rounds, with one wait in each."""

from dataclasses import replace

import pytest
from fixtures_choices import let_choose
from lawkit import make_engine, random_prompts, run, texts

from sameseed import devices
from sameseed.models.drawn import Drawn
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams
from sameseed.spec.draft import LateDraft

PROMPTS = random_prompts(5, seed=4, longest=20)
CHAINS = {"draft_model": {}, "self_quant": {}, "eagle": {"options": {"top_k": 1}}}
PLAIN = SamplingParams(max_tokens=24, temperature=0.8, seed=6)
EACH = [replace(PLAIN, max_tokens=n, temperature=t) for n, t in ((24, 0.8), (5, 0.0), (24, 1.0), (1, 0.8), (24, 0.0))]


@pytest.fixture
def choosing(reference_pair, monkeypatch):
    let_choose(monkeypatch, reference_pair.target.ops)
    return reference_pair


@pytest.fixture(scope="module")
def ends(reference_pair):
    """Parameters with which texts end inside drafts, and the text of each prompt alone."""
    whole = texts(run(make_engine(reference_pair, max_len=48), PROMPTS, EACH))
    each = [replace(p, stop_token_ids=t[-4:-2]) for p, t in zip(EACH, whole, strict=True)]
    return each, texts(run(make_engine(reference_pair, max_len=48), PROMPTS, each, alone=True))


@pytest.fixture
def reads(monkeypatch):
    """How many numbers each wait reads."""
    sizes = []
    read = devices.read
    monkeypatch.setattr(devices, "read", lambda x: (sizes.append(x.numel()), read(x))[1])
    return sizes


def rounds(done):
    return [replace(c.metrics.spec, num_ahead=0) for c in done]


def looked_at(engine, monkeypatch, params):
    """The same run, but the host reads each token before the next is drafted."""
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "takes_late", False)
        patch.setattr("sameseed.models.eagle.HeadRunner.draw", lambda *_: None)
        return run(engine, PROMPTS, params)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("few", [False, True])
def test_rounds_are_the_same_unread(name, few, choosing, ends, monkeypatch):
    """Greedy and sampled, of several lengths, with ends of texts inside drafts, and with preemptions."""
    how = {"method": name, "k": 4, **CHAINS[name], **({"block": 4, "tokens": 52} if few else {})}
    how["max_len"] = 48
    each, plain = ends
    wanted = looked_at(make_engine(choosing, **how), monkeypatch, each)
    settled = []
    settle = LateDraft.settle

    def counted(self, numbers):
        done = settle(self, numbers)
        settled.append(sum(self.counts) - len(done.tokens))
        return done

    monkeypatch.setattr(LateDraft, "settle", counted)
    done = run(make_engine(choosing, **how), PROMPTS, each)
    assert texts(done) == plain == texts(wanted)
    assert any(settled) and (few or rounds(done) == rounds(wanted))
    assert not few or any(c.metrics.num_preemptions for c in done)


def reads_per_step(engine, reads, monkeypatch):
    """The number of waits in each step, a list that grows as the engine runs."""
    steps, step = [], engine.step

    def counted():
        reads.clear()
        done = step()
        steps.append(len(reads))
        return done

    monkeypatch.setattr(engine, "step", counted)
    return steps


@pytest.mark.parametrize("name", CHAINS)
def test_a_policy_that_looks_cuts_afterwards(name, choosing, reads, monkeypatch):
    how = {"method": name, "k": 4, "confidence": 0.5, **CHAINS[name]}
    greedy = replace(PLAIN, temperature=0.0)
    wanted = looked_at(make_engine(choosing, **how), monkeypatch, greedy)
    engine = make_engine(choosing, **how)
    steps = reads_per_step(engine, reads, monkeypatch)
    done = run(engine, PROMPTS, greedy)
    assert texts(done) == texts(wanted) and rounds(done) == rounds(wanted)
    assert 0 < engine.metrics.num_draft_tokens < 4 * engine.metrics.num_drafts
    assert max(steps) == 2


@pytest.mark.parametrize("name", CHAINS)
def test_a_round_waits_once(name, choosing, reads, monkeypatch):
    engine = make_engine(choosing, **{"method": name, "k": 4, **CHAINS[name]})
    steps = reads_per_step(engine, reads, monkeypatch)
    run(engine, PROMPTS, PLAIN)
    assert max(steps) == 1 and engine.metrics.num_accepted_tokens


def test_a_trimming_policy_and_a_penalty_are_served_as_before(choosing):
    many = [PLAIN, replace(PLAIN, repetition_penalty=1.2), replace(PLAIN, logprobs=1), PLAIN, PLAIN]
    plain = texts(run(make_engine(choosing), PROMPTS, many, alone=True))
    for policy in ("goodput", "disco", "fixed"):
        assert texts(run(make_engine(choosing, "draft_model", 4, policy=policy), PROMPTS, many)) == plain


@pytest.mark.failing_drafter
def test_a_chain_that_cannot_be_read_costs_speed_alone(choosing, monkeypatch):
    def broken(self, numbers):
        raise RuntimeError("lost")

    plain = texts(run(make_engine(choosing), PROMPTS, PLAIN))
    monkeypatch.setattr(Drawn, "split", broken)
    engine = make_engine(choosing, "draft_model", 4)
    assert texts(run(engine, PROMPTS, PLAIN)) == plain and not engine.metrics.num_draft_tokens
