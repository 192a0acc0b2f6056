"""Drafters that combine others: cascades of any depth, and lookup drafters that are tried before a model."""

from dataclasses import replace

import pytest
from lawkit import SAMPLED, Pair, make_engine, random_prompts, run, texts

from sameseed.config import SpecConfig, parse_draft
from sameseed.drafters.first import FirstDrafter
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError
from sameseed.lengths.fixed import FixedLength
from sameseed.lengths.goodput import GoodputLength
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Below, Drafter, Parts, level_metrics

PROMPTS = random_prompts(6, seed=12)
GREEDY = SamplingParams(max_tokens=30, seed=2, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=30, seed=2, ignore_eos=True, **SAMPLED)
NGRAM, SUFFIX = SpecConfig("ngram", num_draft_tokens=4), SpecConfig("suffix", num_draft_tokens=8)


class Scripted(Drafter):
    """Proposes the right tokens from a list, except wrong ones at given positions."""

    def __init__(self, right, wrong_at):
        self.right = right  # by sequence id: the text that the model will write
        self.wrong_at = wrong_at
        self.rewinds: list[int] = []

    def propose(self, seqs, num_draft):
        chains = []
        for seq, k in zip(seqs, num_draft):
            places = range(len(seq), min(len(seq) + k, len(self.right[seq.seq_id])))
            chains.append([self.right[seq.seq_id][i] ^ (i in self.wrong_at) for i in places])
        return Draft.chains(chains)

    def rewind(self, seq, length):
        assert length < len(seq)
        self.rewinds.append(length)


def cascade_of(pair, below, asked, k, **options):
    """An engine whose drafter is a cascade over the pair's draft model; `below` is asked for `asked` tokens."""
    engine = make_engine(pair, "cascade", k=k, options=options)
    engine.drafter.below = engine.drafter.followers.below = below
    engine.drafter.policy_below = FixedLength(asked)
    return engine


def written(pair, prompt, length):
    """The prompt and the text that the pair's draft model writes after it."""
    twin = Pair(pair.draft, pair.draft, pair.tokenizer)
    return [
        *prompt,
        *run(make_engine(twin), [prompt], SamplingParams(max_tokens=length, seed=2, ignore_eos=True))[0].token_ids,
    ]


@pytest.mark.parametrize(("right", "passes"), [(0, 6), (1, 3), (2, 2), (4, 2), (6, 1)])
def test_passes_of_the_model_by_what_is_right_below(pair, right, passes):
    """Six tokens are wanted; the drafter below has `right` right tokens per guess, and each pass adds one token."""
    prompt = PROMPTS[0]
    text = written(pair, prompt, 12)
    below = Scripted({0: text}, set())
    engine = cascade_of(pair, below, right, k=6, min_length=6)
    seq = Sequence(0, prompt, GREEDY, 2)
    draft = engine.drafter.propose([seq], [6])
    assert draft.tokens.tolist() == text[len(prompt) :][:6], "never longer than asked for"
    metrics = engine.drafter.metrics
    assert (metrics.num_rounds, metrics.num_accepted_tokens) == (passes, passes * right)
    assert level_metrics(engine.drafter)[-1][1] is metrics
    engine.drafter.release(seq)


def test_a_model_forgets_what_is_taken_back(pair):
    """After `rewind` and other tokens in their place, a draft model guesses as one that never saw what was there."""
    drafter, fresh = (make_engine(pair, "draft_model", k=4).drafter for _ in range(2))
    seq = Sequence(0, PROMPTS[0], GREEDY, 2)
    for i, (guessed, kept) in enumerate([([3, 4, 9, 9], 2), ([11, 12, 9, 11], 0), ([5, 1, 2, 3], 3)], 1):
        seq.token_ids += guessed
        drafter.propose([seq], [4])
        drafter.rewind(seq, len(seq) - len(guessed) + kept)
        del seq.token_ids[len(seq) - len(guessed) + kept :]
        seq.token_ids += [20 + i, 30 + i, 40 + i, 50 + i]
        again = Sequence(i, seq.token_ids, GREEDY, 2)
        again.num_prompt = seq.num_prompt
        assert drafter.propose([seq], [4]).nodes(0) == fresh.propose([again], [4]).nodes(0)


def first_of(options, *below):
    return FirstDrafter(options, Parts(None, FixedLength(8), below=tuple(Below(d, FixedLength(8)) for d in below)))


class Fixed(Drafter):
    """Always proposes the same chain, with one confidence."""

    def __init__(self, chain, likely):
        self.chain, self.likely, self.asked = chain, likely, 0

    def propose(self, seqs, num_draft):
        self.asked += sum(k > 0 for k in num_draft)
        chains = [self.chain[:k] for k in num_draft]
        return Draft.chains(chains, [[self.likely] * len(c) for c in chains])


@pytest.mark.parametrize(
    ("chain", "likely", "num_draft", "taken"),
    [
        ([7, 8, 9], 1.0, 5, True),
        ([], 1.0, 5, False),
        ([7], 1.0, 5, False),  # too short
        ([7], 1.0, 1, True),  # short, but all that was asked for
        ([7, 8, 9], 0.2, 5, False),  # too low a confidence
        ([7, 8, 9], 0.4, 5, True),
    ],
)
def test_a_weak_guess_leaves_it_to_the_next(chain, likely, num_draft, taken):
    first, second = Fixed(chain, likely), Fixed([1, 2, 3], 0.9)
    drafter = first_of(FirstDrafter.Options(), first, second)
    seqs = [Sequence(i, [1], SamplingParams(), 0) for i in range(2)]
    draft = drafter.propose(seqs, [num_draft, 0])
    assert draft.nodes(0)[0] == (chain if taken else [1, 2, 3])[:num_draft]
    assert draft.nodes(1)[0] == []
    assert set(draft.node_levels(0)) == {0 if taken else 1}
    assert (first.asked, second.asked) == (1, 0 if taken else 1)


def test_drafts_as_text():
    model = SpecConfig("draft_model", "some/model")
    assert parse_draft("ngram") == SpecConfig("ngram")
    assert parse_draft("some/model") == model
    # Each drafter of `first` is asked for as many tokens as the whole.
    suffix = SpecConfig("suffix", num_draft_tokens=64)
    first = SpecConfig("first", below=(suffix, replace(model, num_draft_tokens=64)))
    assert parse_draft("suffix+some/model") == first
    assert parse_draft("ngram > some/model") == SpecConfig("cascade", "some/model", below=(SpecConfig("ngram"),))
    assert parse_draft("suffix + some/model > a/b") == SpecConfig("cascade", "a/b", below=(first,))
    inner = SpecConfig("cascade", "some/model", below=(SpecConfig("ngram"),))
    assert parse_draft("suffix + (ngram > some/model)") == SpecConfig(
        "first", below=(suffix, replace(inner, num_draft_tokens=64))
    )
    assert parse_draft("ngram > some/model > a/b").below == (inner,)


@pytest.mark.parametrize(
    "text", ["+ngram", "ngram >", "(ngram", "ngram)", "> a/b", "a/b > (ngram + suffix)", "ngram (suffix)", ""]
)
def test_bad_drafts_as_text(text):
    with pytest.raises(ConfigError, match="--draft"):
        parse_draft(text)


def test_settings_of_the_levels_below():
    config = make_config(
        "ngram > a/b", num_draft_tokens=9, draft_options={"min_length": 3, "below": [{"num_draft_tokens": 2}]}
    )
    assert config.spec.num_draft_tokens == 9
    assert config.spec.options == {"min_length": 3}
    assert config.spec.below == (SpecConfig("ngram", num_draft_tokens=2),)
    for bad in ([], [3], [{"method": "x"}], [{}, {}], [{"options": 3}], [{"confidence": True}]):
        with pytest.raises(ConfigError):
            make_config("ngram > a/b", draft_options={"below": bad})


def test_a_drafter_without_what_it_works_with(pair):
    with pytest.raises(ConfigError, match="ngram > MODEL"):
        make_engine(pair, "cascade", below=())
    with pytest.raises(ConfigError, match="--draft"):
        make_engine(pair, "first", below=(NGRAM,))


class Clipping(GoodputLength):
    """Asks for six tokens and drops nodes deeper than two; every third draft is dropped whole."""

    num_rounds = 0

    def lengths(self, seqs, num_rows=None, budget=None, beside=0):
        return [6] * len(seqs)

    def trim(self, draft, seqs, num_rows, members=None):
        self.num_rounds += 1
        return draft.useful([2 if self.num_rounds % 3 else 0] * len(seqs), [set()] * len(seqs))


@pytest.mark.parametrize("clips", [False, True])
def test_first_counts_what_was_checked_of_each_ones_guesses(pair, clips):
    """The levels' counters add up to the engine's, also where a policy drops nodes: no level counts a dropped node."""
    engine = make_engine(pair, "first", k=6)
    if clips:
        engine.policy = Clipping(6)
    run(engine, PROMPTS, GREEDY)
    (one, suffix), (two, model) = level_metrics(engine.drafter)
    assert (one, two) == ("level 1: suffix", "level 2: draft_model")
    assert model.acceptance_rate != suffix.acceptance_rate
    assert suffix.num_drafts > 2 and model.num_drafts > 2
    for field in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_rollbacks"):
        assert getattr(suffix, field) + getattr(model, field) == getattr(engine.metrics, field)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "sampled"])
def test_levels_of_a_tower(pair, params):
    """Law 1 at any depth, and each level's counters."""
    inner = SpecConfig("cascade", num_draft_tokens=4, below=(SpecConfig("first", below=(NGRAM, SUFFIX)),))
    engine = make_engine(pair, "cascade", k=6, below=(inner,))
    assert texts(run(engine, PROMPTS, params)) == texts(run(make_engine(pair), PROMPTS, params))
    names = [name for name, _ in level_metrics(engine.drafter)]
    assert names == ["level 1: ngram", "level 2: suffix", "level 3: first", "level 4: cascade"]
    ngram, suffix, both, _ = (metrics for _, metrics in level_metrics(engine.drafter))
    assert ngram.num_accepted_tokens + suffix.num_accepted_tokens == both.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("wrong", "levels"),
    [
        ({1}, [0, 1, 0, 0, 0, 1]), (set(), [0, 0, 0, 1, 0, 0]), ({0, 1, 2, 3, 4, 5, 6}, [1] * 6),
        ({3}, [0, 0, 0, 1, 0, 0]),
    ],
)  # fmt: skip
def test_a_cascade_tells_its_own_tokens_from_those_below(pair, wrong, levels):
    """The drafter below guesses three tokens per pass; wrong guesses, and every fourth token, are the model's own."""
    prompt = PROMPTS[0]
    below = Scripted({0: written(pair, prompt, 12)}, {len(prompt) + i for i in wrong})
    engine = cascade_of(pair, below, 3, k=6, min_length=6)
    draft = engine.drafter.propose([Sequence(0, prompt, GREEDY, 2)], [6])
    assert draft.node_levels(0) == levels
    assert draft.tokens.tolist() == below.right[0][len(prompt) :][:6]
