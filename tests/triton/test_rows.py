"""Rows prepared for a product: rows too wide for registers."""

import math

import pytest
import torch
from fixtures_ops import randn

from sameseed import ops
from sameseed.ops import Then, gated_rows, normed_rows, plain_rows, triton as gpu
from sameseed.ops.triton import dispatch, guard, prepared as host, tiling as cuts
from sameseed.scheme import QuantScheme

backend = ops.resolve("triton", "cpu" if guard.interpreted() else "cuda")


def packed(name, O, K):  # noqa: E741
    return backend.pack(QuantScheme.parse(name).encode(randn(O, K, seed=1)))


@pytest.mark.parametrize(
    ("form", "group"), [("single", 1), ("bf16", 320), ("half", 320), ("int8", 64), ("int8", 320), ("fp8", 64)]
)
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_wide_gated_rows_have_the_bits_of_whole_ones(gate, form, group, monkeypatch):
    x = 4 * randn(6, 640)
    x[1], x[2], x[3] = 0.0, x[2] * 2.0**-60, x[3] * 1e15
    x[4, 300], x[5, 500] = math.nan, math.inf
    whole, expected = host.preparation(gated_rows(x, gate), form, group)
    monkeypatch.setattr(host, "MOST_AT_ONCE", 256)
    monkeypatch.setattr(host, "CHUNK", 128)
    parts, got = host.preparation(gated_rows(x, gate), form, group)
    assert parts.constants["CHUNK"] == 128 and whole.constants["CHUNK"] == whole.constants["BLOCK"] == 512
    whole.run()
    parts.run()
    for a, b in ((got.values, expected.values), (got.scales, expected.scales)):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["bf16", "w4a16-g32", "w4a8-g32", "fp8-a8", "w8a8"])
def test_shares_added_and_normed_at_once_have_the_bits_of_both(name, monkeypatch):
    """The next product uses the prepared rows if they are for its norm and kind of weight."""
    monkeypatch.setattr(cuts, "SHORTEST", 1)
    monkeypatch.setattr(cuts, "SPLITS", (1, 2))  # two shares if there are two steps, since there are few programs
    cuts.cut.cache_clear()
    w, after, norm = packed(name, 64, 256), packed(name, 20, 64), randn(64, seed=4)
    x, residual = randn(5, 256), randn(5, 64, seed=3)
    plain = gpu.product(plain_rows(x), w, None, residual)
    joined = gpu.product(plain_rows(x), w, None, residual, Then(norm, 1e-5, after))
    assert joined.equal(plain) and not hasattr(plain, "made")
    rows = normed_rows(joined, norm, 1e-5)
    ready, apart = joined.made.ready, host.preparation(rows, host.form_for(after), after.group)
    apart[0].run()
    assert ready.values.equal(apart[1].values)
    assert ready.scales is None if apart[1].scales is None else ready.scales.equal(apart[1].scales)
    expected = gpu.product(normed_rows(plain, norm, 1e-5), after)
    with monkeypatch.context() as counted:
        counted.setattr(dispatch, "preparation", None)
        assert gpu.product(rows, after).equal(expected)
    other = randn(64, seed=5)  # another norm: the prepared rows do not fit
    expected = gpu.product(normed_rows(plain, other, 1e-5), after)
    assert gpu.product(normed_rows(joined, other, 1e-5), after).equal(expected)
    cuts.cut.cache_clear()
