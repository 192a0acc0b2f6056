"""Sampling against a slow textbook implementation; penalties along a draft; logits that cannot be sampled."""

import math
import warnings

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from sameseed import _native
from sameseed.laws import textbook
from sameseed.request import SamplingParams, Sequence
from sameseed.spec import sampling
from sameseed.spec.sampling import (
    FAILED,
    adjust,
    choose,
    gumbel_noise,
    native_choice,
    numpy_choice,
    numpy_probability,
    probability,
    survivors,
    token_logprob,
)

V = 12
EOS = (3,)
tokens = st.integers(0, V - 1)
some_tokens = st.lists(tokens, max_size=6).map(tuple)


@st.composite
def requests(draw):
    """Random parameters; bias and penalties from a grid, so that ties occur."""
    grid = st.sampled_from([-1.5, -0.5, 0.0, 0.25, 1.0])
    return SamplingParams(
        max_tokens=20,
        min_tokens=draw(st.integers(0, 6)),
        temperature=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5])),
        top_k=draw(st.integers(-1, V + 2)),
        top_p=draw(st.sampled_from([0.05, 0.5, 0.9, 0.97, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.2, 0.9])),
        repetition_penalty=draw(st.sampled_from([0.7, 1.0, 1.3])),
        presence_penalty=draw(grid),
        frequency_penalty=draw(grid),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-math.inf, -3.0, 0.5, 4.0]), max_size=3)),
        allowed_token_ids=draw(st.none() | st.sets(tokens, min_size=8).map(tuple)),
        banned_token_ids=draw(st.lists(tokens, max_size=3).map(tuple)),
        stop_token_ids=draw(st.lists(tokens, max_size=2).map(tuple)),
    )


def sequence(params, prompt=(1,), output=(), seed=0):
    seq = Sequence(0, prompt, params, seed)
    seq.token_ids += output
    return seq


@settings(max_examples=400)
@given(
    params=requests(),
    logits=st.lists(st.floats(-8, 8, width=32), min_size=V, max_size=V),
    prompt=some_tokens.map(lambda t: (1, *t)),
    output=some_tokens,
    path=some_tokens,
    seed=st.integers(0, 2**63 - 1),
)
def test_equals_the_textbook(params, logits, prompt, output, path, seed):
    seq = sequence(params, prompt, output, seed)
    row = np.array(logits, np.float32)
    mine = adjust(row, seq, path, EOS)
    known = textbook.adjusted(logits, params, prompt, (*output, *path), EOS)
    np.testing.assert_allclose(mine, known, rtol=1e-12, atol=1e-12)
    token = choose(row, seq, path, EOS)
    assert numpy_choice(mine, params, seed, len(prompt) + len(output) + len(path)) == token
    if max(known) == -math.inf:
        assert token == FAILED
        return
    wanted = textbook.probabilities(mine.tolist(), params)
    if params.greedy:
        assert wanted[token] == 1.0
        return
    ids, values = survivors(mine, params)
    assert ids.tolist() == [t for t in range(V) if wanted[t] > 0.0]
    weights = np.exp(values)
    np.testing.assert_allclose(weights / weights.sum(), [wanted[t] for t in ids], rtol=1e-9)
    position = len(prompt) + len(output) + len(path)
    scores = np.log(weights / weights.sum()) + gumbel_noise(seed, position, ids)
    assert token == ids[scores.argmax()]


@st.composite
def rows(draw):
    """Logits in either width, over several chunks of the native loops; with ties, excluded tokens, NaN and infinity."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = rng.standard_normal(draw(st.sampled_from([1, 2, 7, 63, 64, 65, 200, 1000, 5000])))
    row *= draw(st.sampled_from([0.0, 0.01, 1.0, 3.0, 12.0]))
    if draw(st.booleans()):
        row = row.round()
    share = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    row[rng.random(len(row)) < share] = -np.inf
    if draw(st.integers(0, 5)) == 0:
        row[rng.integers(len(row))] = draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30]))
    return row.astype(draw(st.sampled_from([np.float32, np.float64])))


@st.composite
def draws(draw):
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-300, 0.05, 0.7, 1.0, 3.0, 1e6])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 40, 64, 65, 199, 4999, 9000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-17, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-16])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-9, 0.02, 0.5, 1.0])),
    )


@settings(max_examples=400)
@given(row=rows(), params=draws(), seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31))
def test_native_equals_the_specification(row, params, seed, position):
    """On every instruction set, the choice is the specification's and the probability has the same bits."""
    with np.errstate(invalid="ignore", over="ignore"):
        token = numpy_choice(row, params, seed, position)
        likely = numpy_probability(row, params, max(token, 0))
    found = set()
    for isa in ("portable", "avx2", "avx512"):
        try:
            _native.set_isa(isa)
        except ValueError:  # this machine lacks the instruction set
            continue
        assert native_choice(row, params, seed, position) == token, isa
        found.add(probability(row, sequence(params), max(token, 0)))
    _native.set_isa("auto")
    if token != FAILED:
        assert len(found) == 1
        assert found.pop() == pytest.approx(likely, rel=1e-5)  # it only decides draft lengths


def test_native_choices_in_any_row_and_a_large_vocabulary():
    """Rows in strides; and with equal or slowly falling logits the noise decides, which tests every bound on it."""
    params, table = SamplingParams(temperature=0.9), np.random.default_rng(3).standard_normal((4, 6), np.float32)
    strided = [table[:, 2], table[1, ::2], table[0].astype(np.float64)[::-1]]
    for row in (*strided, np.zeros(30_000, np.float32), np.linspace(0.0, -9.0, 30_000, dtype=np.float32)):
        for seed in range(40):
            assert native_choice(row, params, seed, 5) == numpy_choice(row, params, seed, 5)


def test_without_the_native_module(monkeypatch):
    row, seq = np.array([0.0, 3.0, 1.0], np.float32), sequence(SamplingParams(temperature=1.0))
    expected = choose(row, seq, [], ()), probability(row, seq, 1)
    monkeypatch.setattr(sampling, "HAS_NATIVE", False)
    monkeypatch.setattr(sampling, "_native", None, raising=False)
    assert (choose(row, seq, [], ()), pytest.approx(probability(row, seq, 1))) == expected


def test_the_largest_noise_is_finite(monkeypatch):
    """The generator's largest output would be rounded up to 1, for which the noise is infinite."""
    token = np.array([0], np.int64)
    # Run the generator backwards: which key gives 2^64 - 1?
    mask, z = 2**64 - 1, 2**64 - 1
    z ^= z >> 31 ^ z >> 62
    z = z * pow(0x94D049BB133111EB, -1, 2**64) & mask
    z ^= z >> 27 ^ z >> 54
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    z ^= z >> 30 ^ z >> 60
    key = (z - 0x9E3779B97F4A7C15) & mask
    monkeypatch.setattr(sampling, "noise_key", lambda seed, position: key)
    assert gumbel_noise(0, 0, token)[0] == pytest.approx(53 * math.log(2))
    row, params = np.array([0.0, 30.0, 45.0], np.float32), SamplingParams(temperature=1.0)
    assert native_choice(row, params, 0, 0) == numpy_choice(row, params, 0, 0)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, logprobs=2)
    row = np.array([3.0, 900.0, -3e38, 899.0, -np.inf], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(20):
            assert choose(row, sequence(params, seed=seed), [], ()) == 1
        assert probability(row, sequence(params), 1) == 1.0


def test_ids_beyond_the_vocabulary_are_no_matter():
    params = SamplingParams(
        logit_bias={99: 5.0}, banned_token_ids=(50,), allowed_token_ids=(1, 77), stop_token_ids=(88,), min_tokens=1
    )
    assert choose(np.array([9.0, 1.0, 0.0], np.float32), sequence(params, [1, 60]), [], (61,)) == 1


def test_logprobs_are_of_the_processed_distribution():
    rng = np.random.default_rng(2)
    params = SamplingParams(temperature=0.7, top_k=2, presence_penalty=0.6, logit_bias={4: 1.0}, logprobs=4)
    row = rng.standard_normal(V).astype(np.float32)
    seq = sequence(params, [1], [5, 6])
    known = textbook.adjusted(row.tolist(), params, [1], [5, 6, 7])
    wanted = np.log(textbook.probabilities(known, SamplingParams(temperature=0.7)))
    found = token_logprob(row, seq, [7], 9, ())
    assert found.token_id == 9
    assert found.logprob == pytest.approx(wanted[9], abs=1e-12)
    best = sorted(range(V), key=lambda t: -wanted[t])[:4]
    assert [t for t, _ in found.top] == best
    assert [p for _, p in found.top] == pytest.approx([wanted[t] for t in best], abs=1e-12)


def test_logprobs_leave_out_what_is_ruled_out():
    row = np.array([1.0, 2.0, 2.0, 5.0], np.float32)
    asked = SamplingParams(allowed_token_ids=(0, 1, 2), logprobs=9)
    assert [t for t, _ in token_logprob(row, sequence(asked), [], 1, ()).top] == [1, 2, 0]
    assert token_logprob(row, sequence(SamplingParams(logprobs=0)), [], 1, ()).top == ()


def test_confidence_is_the_probability_at_the_temperature():
    row = np.log(np.array([0.7, 0.2, 0.1], np.float32))
    assert probability(row, sequence(SamplingParams()), 0) == pytest.approx(0.7, rel=1e-6)
    hot = 0.7**0.5 / (0.7**0.5 + 0.2**0.5 + 0.1**0.5)
    assert probability(row, sequence(SamplingParams(temperature=2.0)), 0) == pytest.approx(hot, rel=1e-6)
