"""The tokens that come first under the noise: the first is the sampler's own; native and NumPy agree."""

import numpy as np
import pytest

from sameseed.drafters._choices import choices, likely, native_choices, native_likely, numpy_choices, numpy_likely
from sameseed.request import SamplingParams, Sequence
from sameseed.spec import sampling

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.5, top_k=40, min_p=0.01),
    SamplingParams(temperature=0.3, top_p=0.5, top_k=3),
]
FINDERS = [numpy_choices, *([native_choices] if sampling.HAS_NATIVE else [])]


def rows(count: int, size: int = 1000) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    made = [(4.0 * rng.standard_normal(size)).astype(np.float32) for _ in range(count)]
    made[0][7:] = -np.inf  # fewer tokens than are asked for
    made[1][:] = 1.0  # all equal
    return made


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("find", FINDERS)
def test_the_first_is_what_the_sampler_chooses(find, params):
    for at, row in enumerate(rows(40)):
        found = find(row, params, 11, at, 5)
        assert found[0][0] == sampling.numpy_choice(row, params, 11, at)
        tokens, shares = zip(*found, strict=True)
        assert len(set(tokens)) == len(tokens) <= 5
        assert list(shares) == sorted(shares, reverse=True) and 0.0 < sum(shares) <= 1.0 + 1e-9


@pytest.mark.skipif(not sampling.HAS_NATIVE, reason="the native module is not built")
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 9])
def test_native_choices_are_the_specification_s(params, count):
    for at, row in enumerate(rows(40, 4097)):
        for values in (row, row.astype(np.float64)):
            expected = numpy_choices(values, params, 3, at, count)
            found = native_choices(values, params, 3, at, count)
            assert [t for t, _ in found] == [t for t, _ in expected]
            np.testing.assert_allclose([s for _, s in found], [s for _, s in expected], rtol=1e-9)


@pytest.mark.skipif(not sampling.HAS_NATIVE, reason="the native module is not built")
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("size", [3, 4097])
def test_native_choices_of_rows_are_the_specification_s(params, count, size):
    table = np.stack(rows(20, size))
    ids = np.random.default_rng(2).permutation(9000)[:size].astype(np.int32)
    for values in (table, table.astype(np.float64)):
        for own in (None, ids):
            expected = numpy_likely(values, params, 3, 5, count, own)
            found = native_likely(values, params, 3, 5, count, own)
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_allclose(found[1], expected[1], rtol=1e-9)


@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[2]], ids=str)
def test_without_truncation_rows_give_the_choices(params):
    table = np.stack(rows(20))
    seq = Sequence(1, (1, 2), params, 7)
    tokens, log_shares = likely(table, seq, 0, 5)
    for row, own, shares in zip(table, tokens, log_shares, strict=True):
        found = choices(row, seq, [], (), 5)
        assert own.tolist() == [t for t, _ in found]
        np.testing.assert_allclose(np.exp(shares), [s for _, s in found], rtol=1e-9)


def test_what_truncation_leaves_out_comes_later():
    """Tokens 0 and 1 are in the nucleus. Token 2 is outside: lowered, but first if its noise is large."""
    table = np.array([[3.0, 2.9, 2.0, -np.inf]], np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.8)
    firsts = []
    for seed in range(400):
        tokens, log_shares = likely(table, Sequence(0, (1,), params, seed), 0, 4)
        assert sorted(tokens[0, :3]) == [0, 1, 2] and log_shares[0, 3] == -np.inf
        firsts.append(tokens[0, 0])
    assert 0 < firsts.count(2) < 20


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("find", [numpy_likely, *([native_likely] if sampling.HAS_NATIVE else [])])
def test_a_row_that_is_no_numbers_gives_none_beside_others(find, bad):
    table = np.stack(rows(4, 50)[2:])
    table[0, 7] = bad
    for params in PARAMS:
        tokens, shares = find(table, params, 1, 1, 3, None)
        assert not tokens[0].any() and not shares[0].any() and shares[1].sum() > 0
