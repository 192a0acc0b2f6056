"""Packed weights times float32 rows: right values, and bits that belong to the row on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fixtures_cpu import every_isa, instructions
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st
from torch import Tensor

from sameseed.ops import cpu, gated_rows, normed_rows, plain_rows, resolve
from sameseed.scheme import QuantTensor

pytestmark = pytest.mark.bits

EPS = 2.0**-24
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FORMATS = ["bf16", "int4", "int8", "nf4", *FLOAT8]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Appendix E of Dettmers et al. (2023).
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip


def weight(
    name: str,
    O: int,  # noqa: E741
    K: int,
    G: int,
    zeros: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> QuantTensor:
    """A weight of random finite codes."""
    rng = torch.Generator().manual_seed(seed)
    if name == "bf16":
        return QuantTensor(name, (O, K), {"weight": torch.randn(O, K, generator=rng).bfloat16()})
    parts = {"scales": ((torch.rand(O, K // G, generator=rng) - 0.3) * 0.01).to(dtype)}
    if name == "int8":
        parts["codes"] = torch.randint(-128, 128, (O, K), generator=rng).to(torch.int8)
    elif name in FLOAT8:
        parts["codes"] = torch.randn(O, K, generator=rng).to(FLOAT8[name]).view(torch.uint8)
    else:
        parts["codes"] = torch.randint(0, 16, (O, K), generator=rng).to(torch.uint8)
    if zeros:
        parts["zeros"] = torch.randint(0, 16, (O, K // G), generator=rng).to(torch.uint8)
    return QuantTensor(name, (O, K), parts)


def values(w: QuantTensor) -> tuple[Tensor, Tensor]:
    """What the codes mean, float64 [O, K]; and the size of the parts that a kernel may sum it from."""
    if w.format == "bf16":
        exact = w.parts["weight"].double()
        return exact, exact.abs()
    codes, scales = w.parts["codes"], w.parts["scales"].double().repeat_interleave(w.group, 1)
    if w.format in FLOAT8:
        plain = codes.view(FLOAT8[w.format]).double()
    else:
        plain = NF4[codes.long()].double() if w.format == "nf4" else codes.double() - 8 * (w.format == "int4")
    size = plain.abs()
    if "zeros" in w.parts:
        shift = 8 - w.parts["zeros"].double().repeat_interleave(w.group, 1)
        plain, size = plain + shift, size + shift.abs()
    return plain * scales, size * scales.abs()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


@st.composite
def weights(draw: st.DrawFn) -> QuantTensor:
    name = draw(st.sampled_from(FORMATS))
    grouped = name in ("int4", "int8", "nf4") and draw(st.booleans())
    group = draw(st.sampled_from([32, 64, 128, 160])) if grouped else None
    K = draw(st.integers(1, 300)) if group is None else group * draw(st.integers(1, 4))
    zeros = name == "int4" and draw(st.booleans())
    O = draw(st.integers(1, 140))  # noqa: E741
    return weight(name, O, K, group or K, zeros, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999)))


@every_isa
@given(w=weights(), T=st.integers(0, 40), shift=st.integers(0, 3), added=st.booleans())
@settings(max_examples=60, deadline=None)
def test_products_are_right_and_their_bits_belong_to_the_row(isa, w, T, shift, added):
    O, K = w.shape  # noqa: E741
    x = randn(T, K + 3, seed=K)[:, shift : shift + K]
    bias, residual = (randn(O, seed=1), randn(T, O, seed=2)) if added else (None, None)
    exact, size = values(w)
    wanted, bound = x.double() @ exact.T, x.double().abs() @ size.T
    if bias is not None and residual is not None:
        wanted, bound = wanted + bias + residual, bound + bias.abs() + residual.abs()
    packed = cpu.pack(w)
    assert packed.layout == "cpu" and cpu.serves(packed)
    with instructions(isa):
        got = cpu.product(plain_rows(x), packed, bias, residual)
        for t in range(T):
            row = None if residual is None else residual[t : t + 1]
            assert cpu.product(plain_rows(x[t : t + 1].clone()), packed, bias, row).equal(got[t : t + 1])
    assert ((got.double() - wanted).abs() <= (K + 8) * EPS * bound).all()
    with instructions("portable"):
        assert cpu.product(plain_rows(x), packed, bias, residual).equal(got)


@every_isa
@pytest.mark.parametrize(
    ("name", "K", "G"),
    [("bf16", 520, 520), ("int4", 768, 128), ("int8", 1100, 1100), ("nf4", 512, 64), ("fp8_e4m3", 700, 700)],
)
def test_bits_belong_to_the_row(isa, name, K, G):
    """Alone, in tiles of any height, in panels of decoded strips, on threads."""
    w = cpu.pack(weight(name, 300, K, G, zeros=name == "int4", dtype=torch.bfloat16))
    x = randn(450, K)
    with instructions("portable"):
        wanted = cpu.product(plain_rows(x[:30]), w)
    with instructions(isa):
        for T in (*range(1, 31), 450):
            got = cpu.product(plain_rows(x[:T]), w)
            assert got[:30].equal(wanted[:T])
        with threads(2):
            assert cpu.product(plain_rows(x), w).equal(got)
            assert cpu.product(plain_rows(x[:7]), w).equal(got[:7])
        assert torch.cat([cpu.product(plain_rows(x[t : t + 1]), w) for t in range(450)]).equal(got)


TINY = [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 2.0**-130, 1e-20, 1.0, -1.0, 1e30, -1e30]


@every_isa
@given(
    numbers=st.lists(st.sampled_from(TINY) | st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=64),
    broken=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    name=st.sampled_from(FORMATS),
)
@settings(max_examples=60, deadline=None)
def test_extreme_rows_stay_alone(isa, numbers, broken, name):
    """Of three rows the middle one is broken; its neighbours, denormals and large numbers, are what they are alone."""
    K = len(numbers)
    w = weight(name, 17, K, K, zeros=name == "int4")
    row = torch.tensor(numbers)
    bad = row.clone()
    bad[K // 2] = broken
    x = torch.stack([row, bad, row])
    with instructions(isa):
        packed = cpu.pack(w)
        got, alone = cpu.product(plain_rows(x), packed), cpu.product(plain_rows(row[None]), packed)
        many = cpu.product(plain_rows(x.repeat(9, 1)), packed)
    exact, size = values(w)
    bound = (K + 8) * EPS * (row.double().abs() @ size.T) + (K + 8) * 2.0**-149
    assert ((alone[0].double() - row.double() @ exact.T).abs() <= bound).all()
    assert same(got[[0, 2]], alone.repeat(2, 1)) and not got[1][exact[:, K // 2] != 0].isfinite().any()
    assert same(many, got.repeat(9, 1))
    with instructions("portable"):
        assert same(cpu.product(plain_rows(x), packed), got)


@every_isa
@pytest.mark.parametrize("name", sorted(FLOAT8))
@pytest.mark.parametrize("T", [1, 3, 30])
def test_every_float8_is_read_as_torch_reads_it(isa, name, T):
    codes = torch.arange(256).to(torch.uint8)[:, None]
    exact = codes.view(FLOAT8[name]).float()
    w = cpu.pack(QuantTensor(name, (256, 1), {"codes": codes, "scales": torch.full((256, 1), 0.5)}))
    with instructions(isa):
        assert same(cpu.product(plain_rows(torch.ones(T, 1)), w), (exact.T * 0.5).expand(T, 256))
        assert same(cpu.embedding(torch.arange(256), w), exact * 0.5)


@every_isa
@pytest.mark.parametrize("name", ["int4", "nf4"])
def test_every_nibble_is_read_in_its_place(isa, name):
    """One column at a time is 1: each output then shows that column's code."""
    w = weight(name, 45, 40, 40)
    w.parts["scales"].fill_(1.0)
    with instructions(isa):
        got = cpu.product(plain_rows(torch.eye(40)), cpu.pack(w))
    assert got.equal(values(w)[0].float().T)


@every_isa
@pytest.mark.parametrize("activations", [None, "int8"])
def test_sources_are_the_separate_ops(isa, activations):
    w = cpu.pack(replace(weight("int4", 50, 64, 32, zeros=True), activations=activations))
    x, norm = randn(5, 128), randn(64, seed=3)
    rows = torch.tensor([4, 0, 4], dtype=torch.int32)
    with instructions(isa):
        assert cpu.product(gated_rows(x), w).equal(cpu.product(plain_rows(cpu.silu_mul(x)), w))
        normed = cpu.rms_norm(x[:, :64], norm, 1e-5)
        assert cpu.product(normed_rows(x[:, :64], norm, 1e-5, rows), w).equal(
            cpu.product(plain_rows(normed[rows.long()]), w)
        )


# --- packing ---


@given(w=weights())
@settings(max_examples=80, deadline=None)
def test_unpack_is_the_inverse_of_pack(w):
    packed = cpu.pack(w)
    assert packed.layout == "cpu" and packed.group == w.group and packed.shape == w.shape
    plain = cpu.unpack(packed)
    assert plain.parts.keys() == w.parts.keys() and plain.layout == "plain" and plain.activations is None
    assert all(plain.parts[n].equal(w.parts[n]) and plain.parts[n].dtype is w.parts[n].dtype for n in w.parts)
    exact = values(w)[0].float()
    index = torch.arange(w.shape[0]).flip(0)
    torch.testing.assert_close(cpu.embedding(index, packed), exact[index], rtol=2 * EPS, atol=0)


def test_nans_among_codes_survive_packing_and_joining():
    whole = weight("fp8_e4m3", 96, 24, 24)
    whole.parts["codes"][70, 5] = 0xFF
    pieces = [
        replace(whole, shape=(b - a, 24), parts={n: t[a:b] for n, t in whole.parts.items()})
        for a, b in ((0, 64), (64, 96))
    ]
    joined, packed = cpu.concat([cpu.pack(p) for p in pieces]), cpu.pack(whole)
    assert joined.parts.keys() == packed.parts.keys() == {"codes", "scales", "nans"}
    assert all(joined.parts[n].equal(packed.parts[n]) for n in packed.parts)
    assert cpu.unpack(joined).parts["codes"].equal(whole.parts["codes"])
    got = cpu.product(plain_rows(randn(3, 24)), joined)
    assert got[:, 70].isnan().all() and got.isnan().sum() == 3
    assert int(cpu.embedding(torch.tensor([70]), joined).isnan().sum()) == 1


def test_what_no_kernel_serves_stays_plain():
    odd = weight("nf4", 8, 48, 24)
    assert cpu.pack(odd) is odd and not cpu.serves(odd)
    ops, w = resolve("cpu"), weight("fp8_e5m2", 8, 48, 48)
    packed = ops.pack(w)
    assert packed.layout == "cpu" and ops.pack(packed) is packed and not cpu.serves(w)


@pytest.mark.parametrize(
    ("name", "part", "wrong", "error"),
    [
        ("fp8_e4m3", "codes", lambda t: t[:1], ValueError),
        ("fp8_e4m3", "codes", lambda t: t.view(torch.int8), TypeError),
        ("fp8_e4m3", "scales", lambda t: t[:1], ValueError),
        ("bf16", "weight", lambda t: t.half(), TypeError),
        ("bf16", "weight", lambda t: t[:, :1], ValueError),
        ("nf4", "scales", lambda t: t.double(), TypeError),
    ],
)
def test_corrupt_packed_tensors_are_refused(name, part, wrong, error):
    w = cpu.pack(weight(name, 70, 96, 96))
    corrupt = replace(w, parts={**w.parts, part: wrong(w.parts[part])})
    for call in (lambda: cpu.product(plain_rows(randn(1, 96)), corrupt), lambda: cpu.unpack(corrupt)):
        with pytest.raises(error, match="pack it again"):
            call()
