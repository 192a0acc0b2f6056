"""Grammars: texts contain only what is allowed, and are the same with and without drafts for the same seed."""

import logging
import random
from collections import Counter

import numpy as np
import pytest
from lawkit import EOS, MODEL_VOCAB, Pair, assert_nothing_left, finished, make_engine, write

from sameseed.errors import RequestError
from sameseed.grammar import Choice, Vocabulary
from sameseed.request import Request, SamplingParams
from sameseed.server.text import vocabulary as vocabulary_of

CHOICES = ["the sum", "the whole", "the", "für", "你好", "list"]


@pytest.fixture
def vocabulary(pair):
    return vocabulary_of(pair.tokenizer, MODEL_VOCAB, [EOS])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_copy_of_the_target_guesses_only_what_the_grammar_allows(pair, vocabulary, temperature):
    grammar = Choice(CHOICES, vocabulary)
    params = SamplingParams(max_tokens=20, temperature=temperature)
    plain = write(make_engine(pair), grammar, params, range(12))
    engine = make_engine(Pair(pair.target, pair.draft, pair.tokenizer), "self_quant", k=4, seqs=4)
    assert [c.token_ids for c in write(engine, grammar, params, range(12))] == [c.token_ids for c in plain]
    assert engine.metrics.acceptance_rate == 1.0
    assert not engine.drafter._guides


def test_every_choice_can_be_made(pair, vocabulary):
    hot = SamplingParams(max_tokens=20, temperature=8.0)
    counts = Counter(c.text for c in write(make_engine(pair, seqs=32), Choice(CHOICES, vocabulary), hot, range(120)))
    assert set(counts) == set(CHOICES)


def test_masks_are_those_of_every_choice_on_its_own():
    """The masks equal those of each choice by itself: sorting and shared prefixes only save work."""
    rng = random.Random(0)
    pieces = sorted({bytes(rng.choices(b"ab\xc3", k=rng.randint(0, 7))) for _ in range(90)})
    pieces += [b"a" * n for n in (8, 9, 15, 16, 17, 33, 70)] + [b"a" * 8 + b"b", b"a" * 16 + b"b" * 2]
    vocabulary = Vocabulary([*pieces, *pieces[5:9], b"ab", b"end", b"end"], [len(pieces) + 5, len(pieces) + 6])
    for _ in range(30):
        choices = ["".join(rng.choices("abÃ", k=rng.randint(1, 9))) for _ in range(rng.randint(1, 12))]
        choices += ["a" * rng.randint(1, 90) + "b" * rng.randint(0, 3) for _ in range(4)]
        grammar = Choice(choices, vocabulary)
        for written in {w for c in choices for w in (b"", c.encode()[: rng.randint(0, 9)], c.encode(), b"zz")}:
            expected = {
                t
                for c in {c.encode() for c in choices}
                if c.startswith(written)
                for t in range(len(vocabulary.pieces))
                if (t in vocabulary.eos_token_ids if c == written else _may(vocabulary, t, c[len(written) :]))
            }
            grammar._vocabulary.spell = lambda tokens, w=written: w
            for _ in range(2):
                assert set(np.flatnonzero(grammar.allowed((), ())).tolist()) == expected


def _may(vocabulary, token, text):
    piece = vocabulary.pieces[token]
    return bool(piece) and token not in vocabulary.eos_token_ids and text.startswith(piece)


class GivesUp:
    """A grammar that allows everything; its readers, except the first, fail after `num_left` questions."""

    def __init__(self, num_left, error):
        self.num_left, self.error, self.first = num_left, error, True

    def allowed(self, output, path):
        if not self.first and self.num_left is not None:
            if not self.num_left:
                raise self.error
            self.num_left -= 1
        return np.ones(MODEL_VOCAB, np.bool_)

    def another(self):
        """A reader that fails."""
        made = GivesUp(self.num_left, self.error)
        made.first = False
        return made


@pytest.mark.parametrize("error", [RequestError("too long"), RuntimeError("broken")])
@pytest.mark.parametrize("method", ["draft_model", "cascade"])
def test_a_drafter_whose_grammar_fails_goes_on(reference_pair, method, error, caplog):
    """Only its own drafts may fail in a round; other requests lose none, and nothing is logged."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)

    def run(num_left):
        engine = make_engine(reference_pair, method=method, k=3)
        engine.add(Request("free", (40, 50), params, 1))
        engine.add(Request("bound", (41, 50), params, 2, grammar=GivesUp(num_left, error)))
        done = {name: completion for (name, _), completion in finished(engine).items()}
        assert_nothing_left(engine)
        return done

    with caplog.at_level(logging.INFO, "sameseed"):
        sound, failing = run(None), run(4)
    assert {n: c.token_ids for n, c in failing.items()} == {n: c.token_ids for n, c in sound.items()}
    before, after = sound["free"].metrics.spec, failing["free"].metrics.spec
    assert (before.num_rounds, before.num_drafts) == (after.num_rounds, after.num_drafts)
    assert failing["bound"].metrics.spec.num_drafts >= sound["bound"].metrics.spec.num_drafts - 3 > 0
    assert not caplog.records


def test_bytes_end_with_the_first_end_token():
    assert Vocabulary([b"a", b"<end>", b"b"], [1]).spell([0, 2, 1, 0]) == b"ab"
