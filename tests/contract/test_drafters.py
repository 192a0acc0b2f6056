"""The contract of every drafter in the registry, also new ones; law 1 is in test_families.py."""

import dataclasses

import pytest
from lawkit import DRAFTERS, SAMPLED, assert_nothing_left, below_of, make_engine, random_prompts, run

from sameseed import registry
from sameseed.config import SpecConfig
from sameseed.engine.levels import Level
from sameseed.errors import ConfigError
from sameseed.fields import parse
from sameseed.lengths.confidence import ConfidenceLength
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.drafter import Drafter
from sameseed.spec.step import decode_step

NAMES = DRAFTERS
TREES = [f"{n} with siblings" for n in NAMES if hasattr(registry.load("drafters", n).DRAFTER.Options(), "siblings")]
pytestmark = pytest.mark.parametrize("name", [*NAMES, *TREES])


def engine_for(pair, name, **settings):
    """An engine with a drafter, given as its name or as its name "with siblings"."""
    return make_engine(pair, name.split(" ")[0], options=options_of(name), **settings)


def options_of(name):
    return {"siblings": 2} if name in TREES else {}


@pytest.fixture
def engine(pair, name):
    return engine_for(pair, name, k=6)


def some_sequences():
    asked = [SamplingParams(), SamplingParams(**SAMPLED), SamplingParams(temperature=1.0, frequency_penalty=0.5)]
    return [Sequence(i, p, asked[i % 3], i) for i, p in enumerate([*random_prompts(5), [7] * 30])]


def rounds(engine, seqs, num_draft, count=8):
    """Run rounds of the sequences as the engine does; yields each draft."""
    for seq, k in zip(seqs, num_draft):
        assert engine.runner.blocks.reserve(seq, len(seq) + (count + 1) * (k + 1))
    for _ in range(count):
        yield decode_step(engine.runner, engine.drafter, seqs, [s.num_pending for s in seqs], num_draft)[0]


def test_class_and_options(name):
    draft_class = registry.load("drafters", name.split(" ")[0]).DRAFTER
    assert issubclass(draft_class, Drafter)
    assert draft_class.__doc__
    options = draft_class.Options
    assert dataclasses.is_dataclass(options)
    assert options.__dataclass_params__.frozen
    default = options()
    for field in dataclasses.fields(options):
        assert field.metadata["help"], "each knob is explained"
        parse(options, {field.name: getattr(default, field.name)})
    with pytest.raises(ConfigError, match="unknown option 'nonsense'"):
        parse(options, {"nonsense": 1})


BAD_OPTIONS = {
    "ngram": [{"min_ngram": 0}, {"min_ngram": 3, "max_ngram": 2}, {"max_ngram": 33}],
    "suffix": [
        *({"min_match": 0}, {"min_match": 5, "max_match": 4}, {"length_factor": 0.0}, {"min_probability": 1.5}),
        *({"past": "everyone"}, {"max_places": 0}, {"store": "x"}),
    ],
    "draft_model": [{"siblings": 9}, {"prefill_rows": 0}],
    "eagle": [{"depth": 0}, {"top_k": 65}, {"beyond": "jump"}, {"window": -1}, {"prefill_rows": 0}],
}


def test_options_out_of_range_are_refused(name):
    options = registry.load("drafters", name.split(" ")[0]).DRAFTER.Options
    for bad in BAD_OPTIONS.get(name, []):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            options(**bad)


def test_who_may_branch_says_so_before_it_is_built(engine, name):
    """A drafter that may return trees says so before it is built; all others return chains."""
    method, drafter = name.split(" ")[0], engine.drafter
    assert Level.of(SpecConfig(method, options=options_of(name), below=below_of(method))).branches == drafter.branches
    assert drafter.branches or name not in TREES
    for draft in rounds(engine, some_sequences(), [6] * 6, count=3):
        for b in range(draft.num_seqs):
            parents = draft.nodes(b)[1]
            assert drafter.branches or parents == list(range(-1, len(parents) - 1))


def test_who_heeds_confidence_says_so(pair, name, monkeypatch):
    asked = []

    def least(policy):
        asked.append(policy.threshold)
        return policy.threshold

    monkeypatch.setattr(ConfidenceLength, "least_probability", property(least))
    run(engine_for(pair, name, k=4, confidence=0.5), random_prompts(2), SamplingParams(max_tokens=12, seed=1))
    method = name.split(" ")[0]
    assert bool(asked) == Level.of(SpecConfig(method, below=below_of(method))).heeds_confidence


def test_drafts_are_well_formed(engine, name):
    num_draft = [0, 1, 2, 6, 64, 6]
    most = 0
    for draft in rounds(engine, some_sequences(), num_draft, count=3):
        assert draft.num_seqs == 6
        for b, limit in enumerate(num_draft):
            tokens, parents = draft.nodes(b)
            assert len(tokens) == len(parents) <= limit
            assert all(0 <= t < engine.runner.model.config.vocab_size for t in tokens)
            assert all(-1 <= p < i for i, p in enumerate(parents))
            most = max(most, len(tokens))
        assert len(draft.tokens) == len(draft.parents) == draft.offsets[-1]
        assert draft.confidence is None or len(draft.confidence) == len(draft.tokens)
        levels = [level for b in range(6) for level in draft.node_levels(b)]
        assert len(levels) == len(draft.tokens)
        assert set(levels) <= set(range(len(engine.drafter.level_names)))
    assert most > 2, "some guess was made"


def test_propose_leaves_the_sequences_alone(engine, name):
    seqs = some_sequences()
    for _ in rounds(engine, seqs, [3] * 6, count=2):
        pass
    before = [(list(s.token_ids), s.num_cached, list(s.blocks), s.seed, s.num_prompt) for s in seqs]
    free = engine.runner.blocks.num_free
    first = engine.drafter.propose(seqs, [6] * 6)
    assert [(list(s.token_ids), s.num_cached, list(s.blocks), s.seed, s.num_prompt) for s in seqs] == before
    assert engine.runner.blocks.num_free == free
    again = engine.drafter.propose(seqs, [6] * 6)
    assert first.tokens.tolist() == again.tokens.tolist(), "asked again, it guesses the same"
    assert first.parents.tolist() == again.parents.tolist()


def test_a_guess_does_not_depend_on_company(engine, pair, name):
    """Not a law, since a draft may be anything, but it makes the acceptance rate in a batch the same as alone."""
    seqs = some_sequences()
    together = engine.drafter.propose(seqs, [5] * 6)
    for b, seq in enumerate(some_sequences()):
        alone = engine_for(pair, name, k=6).drafter.propose([seq], [5])
        assert alone.nodes(0) == together.nodes(b)


def test_sequences_come_and_go(engine, name):
    """Sequences are preempted, left out for rounds and released: the drafter keeps up, and forgets what is released."""
    seqs = some_sequences()
    for _ in rounds(engine, seqs, [4] * 6, count=2):
        pass
    engine.runner.blocks.release(seqs[3])  # preemption
    for _ in rounds(engine, seqs[3:], [4] * 3, count=3):
        pass
    for _ in rounds(engine, seqs[::-1], [4] * 6, count=2):
        pass
    engine.drafter.release(Sequence(999, [1], SamplingParams(), 0))  # a sequence that the drafter never saw
    for seq in seqs:
        engine.drafter.release(seq)
        engine.drafter.release(seq)
        engine.runner.blocks.release(seq)
    assert_nothing_left(engine)
