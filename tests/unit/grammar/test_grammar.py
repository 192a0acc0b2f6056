"""Grammars: masks along drafts equal those of a naive reader, and drafts change no text."""

import itertools
import json
import logging
import random
import re
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from lawkit import (
    DRAFTERS,
    EOS,
    MODEL_VOCAB,
    TOKENIZER_SIZE,
    Pair,
    Tireless,
    TreeDrafter,
    assert_nothing_left,
    finished,
    knowing,
    make_engine,
    texts,
    write,
)

from sameseed.errors import RequestError
from sameseed.grammar import Choice, Vocabulary
from sameseed.grammar.matching import Matching
from sameseed.request import FinishReason, Request, SamplingParams
from sameseed.server.text import vocabulary as vocabulary_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "list", "für", "你好"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}
PATTERN = r"a(b|bc){0,2}d?[ef]"
CHOICES = ["the sum", "the whole", "the", "für", "你好", "list"]


@pytest.fixture(scope="module")
def vocabulary(pair):
    return vocabulary_of(pair.tokenizer, MODEL_VOCAB, [EOS])


@pytest.fixture(scope="module")
def words(vocabulary):
    return Matching(vocabulary)


@pytest.fixture(scope="module")
def person(words):
    return words.language(words.compiled("json", json.dumps(PERSON)))


def test_masks_are_those_of_a_naive_reader(words, vocabulary):
    """Masks of a language small enough to list all of it, asked for in any order."""
    language = {
        "".join(c).encode()
        for n in range(1, 8)
        for c in itertools.product("abcdef", repeat=n)
        if re.fullmatch(PATTERN, "".join(c))
    }
    begun = {word[:i] for word in language for i in range(len(word) + 1)}
    grammar = words.matched(words.language(words.compiled("regex", PATTERN)))
    tokens = [t for t, piece in enumerate(vocabulary.pieces) if piece and set(piece) <= set(b"abcdef")]
    assert len(language) > 15 and any(len(vocabulary.pieces[t]) > 1 for t in tokens)

    @given(st.lists(st.sampled_from([*tokens, EOS]), max_size=6), st.integers(0, 6))
    @settings(max_examples=150)
    def check(path, known):
        mask = grammar.allowed(path[:known], path[known:])
        text = vocabulary.spell(path)
        expected = {EOS} if text in language else set()
        if EOS not in path:
            expected |= {t for t, piece in enumerate(vocabulary.pieces) if piece and text + piece in begun}
        assert set(np.flatnonzero(mask).tolist()) == expected

    check()


def test_any_object(words, vocabulary):
    language = words.language(words.compiled("object", ""))
    tokens = {piece: token for token, piece in enumerate(vocabulary.pieces) if piece}

    def ends(text):
        return bool(words.matched(language).allowed([tokens[bytes([b])] for b in text.encode()], ())[EOS])

    assert all(map(ends, ("{}", '{"a":1}', '{ "a" : [1, {"b": "\\u00e9\\n"}], "c": -0.5e3, "d":null}', '{"für":"你"}')))
    wrong = ("[1]", "1", '{"a":01}', '{"a"}', '{"a":1}x', '{"a":"\n"}', '{"a":  1}', '{"a":1,}', "{'a':1}", "")
    assert not any(map(ends, wrong))


def test_only_tokens_that_write(words, vocabulary):
    """Even if any text is allowed, special tokens and ids beyond the tokenizer are not."""
    mask = words.matched(words.language(words.compiled("regex", r"[\s\S]*"))).allowed((), ())
    assert mask[EOS] and not mask[TOKENIZER_SIZE:].any()
    text = [t for t, piece in enumerate(vocabulary.pieces) if piece.isascii() and piece]
    assert mask[text].all() and len(text) > 100
    assert not words.matched(words.language(words.compiled("regex", "a*"))).allowed((TOKENIZER_SIZE,), (-1,)).any()


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("json", '{"type": "strnig"}', "Unsupported type"),
        ("json", "{", "JSON"),
        ("json", '{"type": "number", "multipleOf": 0.1}', "multipleOf"),
        ("json", '{"type": "array", "minItems": 3, "maxItems": 2}', ""),
        ("json", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ("json", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', ("no text", "Circular")),
        ("regex", "(?=a)b", "Lookahead"),
        ("regex", "a^b", "start of the regex"),
        ("grammar", 'root ::= root "a"', "no text"),
        ("grammar", "root ::= nowhere", "not defined"),
        ("grammar", "start: ?", "Lark"),
        ("grammar", f"root ::= Token({TOKENIZER_SIZE})", "no text"),
    ],
)
def test_what_cannot_be_followed_is_refused(words, kind, source, why):
    """The words are xgrammar's: a schema that refers to itself alone is refused by 0.2.9, and has no text before."""
    with pytest.raises(RequestError) as caught:
        grammar = words.language(words.compiled(kind, source))
        if not words.matched(grammar).allowed((), ()).any():
            raise RequestError("nothing")
        raise AssertionError("taken")
    said = str(caught.value)
    assert any(part in said for part in (why if isinstance(why, tuple) else (why,)))
    assert ".cc" not in said and "/" not in said[:40]


def valid(value):
    assert {"name", "age"} <= value.keys() <= PERSON["properties"].keys()
    assert isinstance(value["name"], str) and len(value["name"]) <= 12
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 150
    assert len(value.get("tags", [])) <= 2 and set(value.get("tags", [])) <= {"a", "list", "für", "你好"}


@pytest.mark.parametrize("after", range(3))
def test_a_drafter_that_guesses_while_the_target_checks(pair, words, person, after):
    """Drafter and target read the text at the same time in two threads, each with its own matcher."""
    params = SamplingParams(max_tokens=90, temperature=1.2, logit_bias={1 + ord('"') - 33: 3.0})
    seeds = range(20 * after, 20 * after + 6)
    plain = write(make_engine(pair), words.matched(person), params, seeds)
    ended = [c for c in plain if c.finish_reason == FinishReason.STOP]
    assert len(ended) > 2
    for completion in ended:
        valid(json.loads(completion.text))
    engine = make_engine(pair, "draft_model", k=5)
    engine.ahead = Tireless(1)
    beside = write(engine, words.matched(person), params, seeds)
    assert [c.token_ids for c in beside] == [c.token_ids for c in plain]
    assert engine.metrics.num_ahead > 0


FEATURES = [
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": 0.3, "n": 2},
    {"temperature": 1.2, "top_k": 9, "min_p": 0.02, "logprobs": 0, "n": 2},
    {"temperature": 1.0, "top_p": 0.8, "logit_bias": {5: 4.0, 40: -3.0}, "banned_token_ids": (280, 281)},
    {"temperature": 1.1, "stop": ("age",), "n": 3},
]
FORMS = [("json", json.dumps(PERSON)), ("regex", PATTERN), ("object", ""), ("grammar", 'root ::= ("ab" | "für")+ "."')]


@pytest.mark.parametrize("name", [*DRAFTERS, "tree"])
def test_every_pair_of_feature_and_grammar(pair, words, name):
    """Every pair of sampling feature and kind of grammar, in one batch: no request fails, no text changes."""
    asked = [
        (SamplingParams(max_tokens=60, **feature), words.language(words.compiled(*form)))
        for feature, form in itertools.product(FEATURES, FORMS)
    ]

    def everything(engine, alone):
        done = {}
        for i, (params, language) in enumerate(asked):
            for index in range(params.n):
                prompt, grammar = (30 + i, 50), words.matched(language)
                engine.add(Request(str(i), prompt, params, 100 * i + index, index=index, grammar=grammar))
            if alone:
                done |= finished(engine)
        done |= finished(engine)
        assert_nothing_left(engine)
        assert all(c.finish_reason != FinishReason.ERROR for c in done.values())
        return [done[key] for key in sorted(done)]

    plain = everything(make_engine(pair), alone=True)
    tree = TreeDrafter(knowing([c.prompt_token_ids for c in plain], texts(plain)), MODEL_VOCAB, seed=5)
    engine = make_engine(pair, rows=256, **({"drafter": tree, "k": 24} if name == "tree" else {"method": name}))
    for c, wanted in zip(everything(engine, alone=False), plain, strict=True):
        assert (c.token_ids, c.text, c.logprobs) == (wanted.token_ids, wanted.text, wanted.logprobs)
    assert name not in ("draft_model", "tree") or engine.metrics.num_accepted_tokens > 20


class Failing:
    """Raises an error after `after` tokens."""

    def __init__(self, whole, after, error):
        self.whole, self.after, self.error = whole, after, error

    def allowed(self, output, path):
        if len(output) + len(path) >= self.after:
            raise self.error
        return self.whole.allowed(output, path)

    def another(self):
        return self


@pytest.mark.failing_drafter
@pytest.mark.parametrize("method", ["none", "draft_model", "eagle"])
def test_a_grammar_that_fails_ends_its_request_alone(pair, words, person, method, caplog):
    """One that is given up is warned of, one that breaks is logged with its trace."""
    free, bound = (SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=i) for i in (True, False))
    errors = {"given up": RequestError("too long"), "broken": RuntimeError("the matcher broke")}

    def neighbours(engine, names):
        engine.add(Request("free", (9, 8), free, 1))
        engine.add(Request("bound", (9, 7), bound, 2, grammar=words.matched(person)))
        for name in names:
            engine.add(Request(name, (9, 6), bound, 3, grammar=Failing(words.matched(person), 7, errors[name])))
        done = {name: completion for (name, _), completion in finished(engine).items()}
        assert_nothing_left(engine)
        return done

    alone = neighbours(make_engine(pair, method), ())
    beside = neighbours(make_engine(pair, method), errors)
    for name in errors:
        failed = beside.pop(name)
        assert failed.finish_reason == FinishReason.ERROR and len(failed.token_ids) == 7
    assert {k: c.token_ids for k, c in beside.items()} == {k: c.token_ids for k, c in alone.items()}
    told = {(record.levelname, record.exc_info is not None) for record in caplog.records}
    assert told >= {("WARNING", False), ("ERROR", True)}


def test_ambiguity_ends_within_its_allowance(words, vocabulary):
    """In this grammar, the number of readings of a text grows without bound, so each token takes longer."""
    grammar = words.matched(words.language(words.compiled("grammar", 'root ::= root root | "a" | ""')))
    letter = vocabulary.pieces.index(b"a")
    start, output = time.thread_time(), []
    with pytest.raises(RequestError, match="too long"):
        while len(output) < 2000:
            assert grammar.allowed(output, ())[letter]
            output.append(letter)
    assert time.thread_time() - start < 60


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
