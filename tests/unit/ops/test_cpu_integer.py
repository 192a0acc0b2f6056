"""Integer products of the native backend, bit for bit, against an oracle in NumPy's int64 and wide floats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures_cpu import every_isa, instructions
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st
from torch import Tensor

from sameseed.ops import cpu, plain_rows, resolve
from sameseed.scheme import QuantTensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(
    name: str,
    O: int,  # noqa: E741
    K: int,
    G: int,
    zeros: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> QuantTensor:
    """A weight of random codes, the extreme ones among them."""
    rng = torch.Generator().manual_seed(seed)
    low, high, kind = (0, 16, torch.uint8) if name == "int4" else (-128, 128, torch.int8)
    parts = {
        "codes": torch.randint(low, high, (O, K), generator=rng).to(kind),
        "scales": ((torch.rand(O, K // G, generator=rng) - 0.3) * 0.01).to(dtype),
    }
    if zeros:
        parts["zeros"] = torch.randint(0, 16, (O, K // G), generator=rng).to(torch.uint8)
    return QuantTensor(name, (O, K), parts, "int8")


def integers(w: QuantTensor) -> np.ndarray:
    """code - zero, [O, K]."""
    codes = w.parts["codes"].numpy().astype(np.int64)
    if w.format == "int8":
        return codes
    zeros = (
        w.parts["zeros"].numpy().astype(np.int64)
        if "zeros" in w.parts
        else np.full((w.shape[0], w.shape[1] // w.group), 8)
    )
    return codes - np.repeat(zeros, w.group, 1)


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of one group of a row."""
    most = np.abs(x).max()
    if not np.isfinite(most):
        return np.zeros(len(x), np.int64), np.float32("nan")
    if most < np.float32(2.0**-100):
        return np.zeros(len(x), np.int64), np.float32(0)
    inverse = np.float32(127) / most
    return np.clip(np.rint(x * inverse), -127, 127).astype(np.int64), most / np.float32(127)


def rounded_once(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma of float32: the product is exact in float64, and the sum is rounded to odd, then to float32."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    with np.errstate(invalid="ignore"):
        toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    odd = (total.view(np.int64) & 1) == 1
    with np.errstate(over="ignore"):
        return np.where((error == 0) | odd | np.isnan(total), total, toward).astype(np.float32)


def product(x: Tensor, w: QuantTensor) -> Tensor:
    """The specification, a row at a time."""
    K, G = w.shape[1], w.group
    codes, scales = integers(w), w.parts["scales"].float().numpy()
    out = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for t, row in enumerate(x.numpy()):
        for g in range(K // G):
            columns = slice(g * G, (g + 1) * G)
            row_codes, scale = quantized(row[columns])
            sums = (codes[:, columns] @ row_codes).astype(np.float32)
            out[t] = rounded_once(sums, scales[:, g] * scale, out[t])
    return torch.from_numpy(out)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


@st.composite
def weights(draw: st.DrawFn) -> QuantTensor:
    name = draw(st.sampled_from(["int4", "int8"]))
    group = draw(st.sampled_from([None, 32, 64, 128]))
    K = draw(st.integers(1, 150)) if group is None else group * draw(st.integers(1, 5))
    zeros = name == "int4" and draw(st.booleans())
    O = draw(st.integers(1, 70))  # noqa: E741
    return weight(name, O, K, group or K, zeros, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999)))


@every_isa
@given(w=weights(), T=st.integers(0, 40), shift=st.integers(0, 3), added=st.booleans())
@settings(max_examples=60)
def test_products_are_those_of_the_oracle(isa, w, T, shift, added):
    O, K = w.shape  # noqa: E741
    x = randn(T, K + 3, seed=K)[:, shift : shift + K]
    bias, residual = (randn(O, seed=1), randn(T, O, seed=2)) if added else (None, None)
    wanted = product(x, w)
    if bias is not None and residual is not None:
        wanted = residual + (wanted + bias)
    with instructions(isa):
        assert same(cpu.product(plain_rows(x), cpu.pack(w), bias, residual), wanted)


EXTREMES = [0.0, -0.0, 1e-45, 2.0**-126, 2.0**-101, 2.0**-100, 1e-20, 1.0, -1.0, 126.5, 127.5, 3.4e38, -3.4e38]


@every_isa
@given(
    values=st.lists(
        st.sampled_from(EXTREMES) | st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64
    ),
    broken=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    name=st.sampled_from(["int4", "int8"]),
)
@settings(max_examples=60)
def test_extreme_rows_stay_alone(isa, values, broken, name):
    """Of three rows the middle one is broken: it is NaN, and its neighbours are what they are without it."""
    K = len(values)
    w = weight(name, 17, K, K)
    row = torch.tensor(values)
    bad = row.clone()
    bad[K // 2] = broken
    with instructions(isa):
        got = cpu.product(plain_rows(torch.stack([row, bad, row])), cpu.pack(w))
    assert same(got[[0, 2]], product(torch.stack([row, row]), w)) and got[1].isnan().all()


@every_isa
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_the_largest_sums_are_exact(isa, name):
    """Codes of full size and one sign: whatever saturates or wraps on its way shows."""
    w = weight(name, 40, 4096, 4096)
    for code in (0, 15) if name == "int4" else (-128, 127):
        w.parts["codes"].fill_(code)
        x = torch.tensor([1.0, -1.0])[:, None] * torch.ones(1, 4096)
        with instructions(isa):
            assert same(cpu.product(plain_rows(x), cpu.pack(w)), product(x, w))


@every_isa
@pytest.mark.parametrize(
    ("name", "K", "G"), [("int4", 1280, 128), ("int4", 1100, 1100), ("int8", 1100, 1100), ("int8", 2048, 32)]
)
def test_bits_belong_to_the_row(isa, name, K, G):
    """Alone, in tiles of any height, in many tiles that share spans of weights, on threads."""
    w = weight(name, 200, K, G, dtype=torch.bfloat16)
    packed, x = cpu.pack(w), randn(512, K)
    with instructions("portable"):
        wanted = torch.cat([cpu.product(plain_rows(x[t : t + 1]), packed) for t in range(40)])
    assert wanted[:3].equal(product(x[:3], w))
    with instructions(isa):
        for T in (*range(1, 41), 512):
            got = cpu.product(plain_rows(x[:T]), packed)
            assert got[:40].equal(wanted[:T])
        with threads(2):
            assert cpu.product(plain_rows(x), packed).equal(got)


# --- packing ---


@given(w=weights())
@settings(max_examples=60)
def test_unpack_is_the_inverse_of_pack(w):
    packed = cpu.pack(w)
    assert packed.layout == "cpu" and packed.group == w.group and packed.shape == w.shape
    plain = cpu.unpack(packed)
    assert plain.parts.keys() == w.parts.keys() and plain.layout == "plain" and plain.activations == "int8"
    assert all(plain.parts[n].equal(w.parts[n]) and plain.parts[n].dtype is w.parts[n].dtype for n in w.parts)


@given(w=weights())
@settings(max_examples=30)
def test_rows_of_an_embedding_are_decoded_exactly(w):
    index = torch.arange(w.shape[0]).flip(0)
    scales = w.parts["scales"].float().repeat_interleave(w.group, 1)
    wanted = torch.from_numpy(integers(w)).float() * scales
    assert cpu.embedding(index, cpu.pack(w)).equal(wanted[index])
    with pytest.raises(IndexError, match="token id"):
        cpu.embedding(torch.tensor([w.shape[0]]), cpu.pack(w))


@pytest.mark.parametrize("zeros", [False, True])
def test_packed_weights_join_along_outputs(zeros):
    whole = weight("int4", 150, 96, 32, zeros)
    pieces = [
        replace(whole, shape=(b - a, 96), parts={n: t[a:b] for n, t in whole.parts.items()})
        for a, b in ((0, 64), (64, 96), (96, 150))
    ]
    joined, packed = cpu.concat([cpu.pack(p) for p in pieces]), cpu.pack(whole)
    assert joined.shape == (150, 96) and all(joined.parts[n].equal(packed.parts[n]) for n in packed.parts)
    with pytest.raises(ValueError, match="join them before pack"):
        cpu.concat([cpu.pack(pieces[2]), cpu.pack(pieces[0])])
    with pytest.raises(ValueError, match="does not fit"):
        cpu.concat([packed, cpu.pack(weight("int4", 32, 64, 32))])


def test_large_weights_are_aligned_and_right():
    w = weight("int8", 2100, 2048, 2048)
    packed = cpu.pack(w)
    assert packed.parts["codes"].data_ptr() % (1 << 21) == 0 and packed.nbytes >= 2100 * 2048
    assert cpu.unpack(packed).parts["codes"].equal(w.parts["codes"])


def test_what_no_kernel_serves_stays_plain():
    odd = weight("int4", 8, 48, 24)
    assert cpu.pack(odd) is odd and not cpu.serves(odd)
    again = cpu.pack(cpu.pack(weight("int4", 8, 64, 32)))
    assert again.layout == "cpu" and resolve("cpu").pack(again) is again


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("codes", lambda t: t[:1], ValueError),
        ("codes", lambda t: t.view(torch.int8), TypeError),
        ("codes", lambda t: t.repeat(2, 1, 1, 1, 1)[::2], ValueError),
        ("scales", lambda t: t[:, :1], ValueError),
        ("scales", lambda t: t.double(), TypeError),
        ("zeros", lambda t: t[:1], ValueError),
        ("zeros", lambda t: t.int(), TypeError),
    ],
)
def test_corrupt_packed_tensors_are_refused(name, wrong, error):
    w = cpu.pack(weight("int4", 70, 96, 32, zeros=True))
    corrupt = replace(w, parts={**w.parts, name: wrong(w.parts[name])})
    for call in (lambda: cpu.product(plain_rows(randn(1, 96)), corrupt), lambda: cpu.unpack(corrupt)):
        with pytest.raises(error, match="pack it again"):
            call()
