"""Products of bf16 weights with rows rounded to bf16: the bits of vdpbf16ps on every instruction set.

The oracle is the law in csrc/kernels.h, in NumPy: pairs of columns in ascending order, the odd column first. Each term
is an fma that treats subnormal inputs and results as zeros.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fixtures_cpu import every_isa, instructions
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st
from torch import Tensor

from sameseed.ops import cpu, gated_rows, normed_rows, plain_rows, reference
from sameseed.scheme import QuantScheme, QuantTensor

pytestmark = pytest.mark.bits

SCHEME = QuantScheme.parse("bf16-a16")
SMALLEST = 2.0**-126


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < SMALLEST, np.copysign(x.dtype.type(0), x), x)


def flushed_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of floats with 8, 8 and 24 bits, rounded once and then flushed.

    The product and the larger part of the sum are exact in float64; the error of rounding the sum to float64 decides
    ties.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    odd = (total.view(np.int64) & 1) == 1
    with np.errstate(over="ignore", invalid="ignore"):
        toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        exact = np.where((error == 0) | odd | ~np.isfinite(total), total, toward)
        # Round to 24 bits as if exponents were unbounded; what is tiny after that is flushed.
        scaled = (exact * 2.0**100).astype(np.float32)
        tiny = (np.abs(exact) < 2.0**-100) & (np.abs(scaled) < np.float32(2.0**-26))
        return np.where(tiny, np.copysign(np.float32(0), exact), exact).astype(np.float32)


def oracle(x: Tensor, w: QuantTensor) -> Tensor:
    """The specification of the product, computing all outputs of a row at once."""
    values = flushed(w.parts["weight"].float().numpy())
    out = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for t, row in enumerate(flushed(x.bfloat16().float().numpy())):
        for pair in range(0, w.shape[1], 2):
            for k in (pair + 1, pair):
                if k < w.shape[1]:
                    out[t] = flushed_fma(np.broadcast_to(row[k], out[t].shape), values[:, k], out[t])
    return torch.from_numpy(out)


def weight(O: int, K: int, seed: int = 0, size: float = 1.0) -> QuantTensor:  # noqa: E741
    return SCHEME.encode(randn(O, K, seed=seed) * size)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


@every_isa
@given(
    T=st.integers(0, 40),
    O=st.integers(1, 140),
    K=st.integers(1, 90),
    shift=st.integers(0, 3),
    added=st.booleans(),
    sizes=st.sampled_from([(0, 0), (-60, -60), (-63, -63), (-66, -62), (-20, -108), (60, 60)]),
)
@settings(max_examples=60, deadline=None)
def test_products_are_those_of_the_oracle(isa, T, O, K, shift, added, sizes):  # noqa: E741
    """Includes terms and sums close to the ends of float32's range."""
    x = (randn(T, K + 3, seed=K) * 2.0 ** sizes[0])[:, shift : shift + K]
    w = weight(O, K, O, 2.0 ** sizes[1])
    bias, residual = (randn(O, seed=1), randn(T, O, seed=2)) if added else (None, None)
    wanted = oracle(x, w)
    if bias is not None and residual is not None:
        wanted = residual + (wanted + bias)
    with instructions(isa):
        assert same(cpu.product(plain_rows(x), cpu.pack(w), bias, residual), wanted)


@every_isa
@pytest.mark.parametrize("K", [520, 1100])
def test_bits_belong_to_the_row(isa, K):
    """A row has the same bits alone, in tiles of any height, in panels with chunks of columns, and on threads."""
    packed, x = cpu.pack(weight(300, K)), randn(400, K)
    with instructions(isa):
        alone = torch.cat([cpu.product(plain_rows(x[t : t + 1]), packed) for t in range(400)])
        for T in (*range(1, 41), 400):
            assert cpu.product(plain_rows(x[:T]), packed).equal(alone[:T])
        with threads(2):
            assert cpu.product(plain_rows(x), packed).equal(alone)
            assert cpu.product(plain_rows(x[:7]), packed).equal(alone[:7])
    with instructions("portable"):
        assert cpu.product(plain_rows(x[:3]), packed).equal(alone[:3])


@every_isa
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row(isa, broken):
    x, packed = randn(14, 40), cpu.pack(weight(33, 40))
    with instructions(isa):
        wanted = cpu.product(plain_rows(x), packed)
        x[5, 7] = broken
        got = cpu.product(plain_rows(x), packed)
    assert not got[5].isfinite().any()
    assert torch.cat([got[:5], got[6:]]).equal(torch.cat([wanted[:5], wanted[6:]]))


@every_isa
def test_subnormals_outside_of_the_sums_are_kept(isa):
    """Subnormals of bias and residual are kept, and so are those of the next product on this thread."""
    w, tiny = weight(8, 4), torch.full((8,), 2.0**-140)
    with instructions(isa):
        got = cpu.product(plain_rows(torch.zeros(3, 4)), cpu.pack(w), tiny, torch.zeros(3, 8))
        assert got.equal(tiny.repeat(3, 1))
        assert cpu.product(plain_rows(torch.full((1, 1), 2.0**-140)), QuantScheme("fp32").encode(torch.ones(1, 1))) > 0


@every_isa
def test_the_reference_rounds_rows_alike(isa):
    w, x = weight(70, 200), randn(9, 200)
    wanted = reference.product(plain_rows(x.bfloat16().float()), QuantScheme("bf16").encode(w.parts["weight"]))
    assert reference.product(plain_rows(x), w).equal(wanted)
    with instructions(isa):
        got = cpu.product(plain_rows(x), cpu.pack(w))
    size = x.bfloat16().float().abs() @ w.parts["weight"].float().abs().T
    assert ((got - wanted).abs() <= 200 * 2.0**-24 * size).all()


@every_isa
def test_sources_are_the_separate_ops(isa):
    packed, x, norm = cpu.pack(weight(50, 64)), randn(15, 64), randn(64, seed=5)
    gate_up, chosen = randn(15, 128, seed=6), torch.tensor([3, 0, 14], dtype=torch.int32)
    with instructions(isa):
        normed = cpu.product(normed_rows(x, norm, 1e-5, chosen), packed)
        assert normed.equal(cpu.product(plain_rows(cpu.rms_norm(x[chosen.long()], norm, 1e-5)), packed))
        gated = cpu.product(gated_rows(gate_up), packed)
        assert gated.equal(cpu.product(plain_rows(cpu.silu_mul(gate_up)), packed))


def test_a_weight_that_is_not_packed_is_left_to_the_reference():
    assert not cpu.serves(weight(3, 4))
    assert cpu.serves(cpu.pack(weight(3, 4)))
    assert cpu.unpack(cpu.pack(weight(37, 21))).parts["weight"].equal(weight(37, 21).parts["weight"])
