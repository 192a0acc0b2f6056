"""Packed weights times rows: right values, and a row's bits do not depend on other rows or the instruction set.

Float rows are compared with float64. Rows in int8 equal those of an oracle in NumPy's int64 and wide floats, bit for
bit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures_cpu import every_isa, instructions
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st
from torch import Tensor

from sameseed import scheme
from sameseed.ops import _native_rows, cpu, gated_rows, normed_rows, plain_rows, resolve
from sameseed.scheme import QuantTensor

pytestmark = pytest.mark.bits

EPS = 2.0**-24
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FORMATS = ["bf16", "int4", "int8", "nf4", *FLOAT8]
INTEGERS = ["int4", "int8"]
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
    activations: str | None = None,
    zeros: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> QuantTensor:
    """A weight of random finite codes, including the extreme ones."""
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
    return QuantTensor(name, (O, K), parts, activations)


def unscaled(w: QuantTensor) -> tuple[Tensor, Tensor]:
    """The codes' values with scales of one, float64 [O, K], and the size of the terms that a kernel may sum."""
    if "weight" in w.parts:
        exact = w.parts["weight"].double()
        return exact, exact.abs()
    codes = w.parts["codes"]
    if w.format in FLOAT8:
        plain = codes.view(FLOAT8[w.format]).double()
    else:
        plain = NF4[codes.long()].double() if w.format == "nf4" else codes.double() - 8 * (w.format == "int4")
    size = plain.abs()
    if "zeros" in w.parts:
        shift = 8 - w.parts["zeros"].double().repeat_interleave(w.group, 1)
        plain, size = plain + shift, size + shift.abs()
    return plain, size


def values(w: QuantTensor) -> tuple[Tensor, Tensor]:
    """The same with the weight's own scales."""
    plain, size = unscaled(w)
    if "scales" not in w.parts:
        return plain, size
    scales = w.parts["scales"].double().repeat_interleave(w.group, 1)
    return plain * scales, size * scales.abs()


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
    """The specification of a product with rows in int8, one row at a time."""
    K, G = w.shape[1], w.group
    codes, scales = unscaled(w)[0].numpy().astype(np.int64), w.parts["scales"].float().numpy()
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
def weights(draw: st.DrawFn, activations: str | None = None) -> QuantTensor:
    name = draw(st.sampled_from(FORMATS if activations is None else INTEGERS))
    grouped = name in ("int4", "int8", "nf4") and draw(st.booleans())
    group = draw(st.sampled_from([32, 64, 128, *([160] if activations is None else [])])) if grouped else None
    K = draw(st.integers(1, 300)) if group is None else group * draw(st.integers(1, 5))
    zeros = name == "int4" and draw(st.booleans())
    O = draw(st.integers(1, 140))  # noqa: E741
    return weight(name, O, K, group or K, activations, zeros, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999)))


def dense(name: str, O: int, K: int) -> tuple[QuantTensor, QuantTensor]:  # noqa: E741
    return (scheme.get(name).encode(randn(O, K, seed=O)),) * 2


dense_weights = st.builds(dense, st.sampled_from(sorted(_native_rows.DTYPES)), st.integers(1, 70), st.integers(1, 100))


@every_isa
@given(
    pair=weights().map(lambda w: (w, cpu.pack(w))) | dense_weights,
    T=st.integers(0, 40),
    shift=st.integers(0, 3),
    added=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_products_are_right_and_their_bits_belong_to_the_row(isa, pair, T, shift, added):
    w, packed = pair
    O, K = w.shape  # noqa: E741
    x = randn(T, K + 3, seed=K)[:, shift : shift + K]
    bias, residual = (randn(O, seed=1), randn(T, O, seed=2)) if added else (None, None)
    exact, size = values(w)
    wanted, bound = x.double() @ exact.T, x.double().abs() @ size.T
    if bias is not None and residual is not None:
        wanted, bound = wanted + bias + residual, bound + bias.abs() + residual.abs()
    assert cpu.serves(packed)
    with instructions(isa):
        got = cpu.product(plain_rows(x), packed, bias, residual)
        for t in range(T):
            row = None if residual is None else residual[t : t + 1]
            assert cpu.product(plain_rows(x[t : t + 1].clone()), packed, bias, row).equal(got[t : t + 1])
    assert ((got.double() - wanted).abs() <= (K + 8) * EPS * bound).all()
    with instructions("portable"):
        assert cpu.product(plain_rows(x), packed, bias, residual).equal(got)


@every_isa
@given(w=weights("int8"), T=st.integers(0, 40), shift=st.integers(0, 3), added=st.booleans())
@settings(max_examples=60)
def test_products_of_int8_rows_are_those_of_the_oracle(isa, w, T, shift, added):
    O, K = w.shape  # noqa: E741
    x = randn(T, K + 3, seed=K)[:, shift : shift + K]
    bias, residual = (randn(O, seed=1), randn(T, O, seed=2)) if added else (None, None)
    wanted = product(x, w)
    if bias is not None and residual is not None:
        wanted = residual + (wanted + bias)
    with instructions(isa):
        assert same(cpu.product(plain_rows(x), cpu.pack(w), bias, residual), wanted)


@every_isa
@pytest.mark.parametrize(
    ("name", "activations", "K", "G"),
    [
        ("bf16", None, 520, 520),
        ("int4", None, 768, 128),
        ("int8", None, 1100, 1100),
        ("nf4", None, 512, 64),
        ("fp8_e4m3", None, 700, 700),
        ("int4", "int8", 1280, 128),
        ("int4", "int8", 1100, 1100),
        ("int8", "int8", 1100, 1100),
        ("int8", "int8", 2048, 32),
    ],
)
def test_bits_belong_to_the_row(isa, name, activations, K, G):
    """A row has the same bits alone, in tiles of any height, in panels of decoded or shared weights, and on threads."""
    w = weight(name, 300, K, G, activations, zeros=name == "int4" and activations is None, dtype=torch.bfloat16)
    packed, x = cpu.pack(w), randn(512, K)
    with instructions("portable"):
        wanted = torch.cat([cpu.product(plain_rows(x[t : t + 1]), packed) for t in range(40)])
    assert activations is None or wanted[:3].equal(product(x[:3], w))
    with instructions(isa):
        for T in (*range(1, 41), 512):
            got = cpu.product(plain_rows(x[:T]), packed)
            assert got[:40].equal(wanted[:T])
        with threads(2):
            assert cpu.product(plain_rows(x), packed).equal(got)
            assert cpu.product(plain_rows(x[:7]), packed).equal(got[:7])
        assert torch.cat([cpu.product(plain_rows(x[t : t + 1]), packed) for t in range(512)]).equal(got)


TINY = [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 2.0**-130, 1e-20, 1.0, -1.0, 1e30, -1e30]
EXTREMES = [0.0, -0.0, 1e-45, 2.0**-126, 2.0**-101, 2.0**-100, 1e-20, 1.0, -1.0, 126.5, 127.5, 3.4e38, -3.4e38]
broken_numbers = st.sampled_from([float("nan"), float("inf"), float("-inf")])


def around(numbers: list[float], broken: float) -> Tensor:
    """Three rows of these numbers, with one number of the middle row replaced."""
    x = torch.tensor(numbers).repeat(3, 1)
    x[1, len(numbers) // 2] = broken
    return x


@every_isa
@given(
    numbers=st.lists(st.sampled_from(TINY) | st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=64),
    broken=broken_numbers,
    name=st.sampled_from(FORMATS),
)
@settings(max_examples=60, deadline=None)
def test_extreme_rows_stay_alone(isa, numbers, broken, name):
    """The middle of three rows is broken; its neighbours, denormals and large numbers, have the bits of rows alone."""
    K, x = len(numbers), around(numbers, broken)
    w, row = weight(name, 17, K, K, zeros=name == "int4"), x[0]
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
@given(
    numbers=st.lists(
        st.sampled_from(EXTREMES) | st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64
    ),
    broken=broken_numbers,
    name=st.sampled_from(INTEGERS),
)
@settings(max_examples=60)
def test_extreme_int8_rows_stay_alone(isa, numbers, broken, name):
    """The middle of three rows is broken and becomes NaN; its neighbours have the values they have without it."""
    x = around(numbers, broken)
    w = weight(name, 17, len(numbers), len(numbers), "int8")
    with instructions(isa):
        got = cpu.product(plain_rows(x), cpu.pack(w))
    assert same(got[[0, 2]], product(x[[0, 2]], w)) and got[1].isnan().all()


@every_isa
@pytest.mark.parametrize("name", INTEGERS)
def test_the_largest_sums_are_exact(isa, name):
    """All codes have full size and one sign, so that saturation or overflow would show."""
    w = weight(name, 40, 4096, 4096, "int8")
    for code in (0, 15) if name == "int4" else (-128, 127):
        w.parts["codes"].fill_(code)
        x = torch.tensor([1.0, -1.0])[:, None] * torch.ones(1, 4096)
        with instructions(isa):
            assert same(cpu.product(plain_rows(x), cpu.pack(w)), product(x, w))


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
    """One column of x at a time is 1, so each output shows that column's code."""
    w = weight(name, 45, 40, 40)
    w.parts["scales"].fill_(1.0)
    with instructions(isa):
        got = cpu.product(plain_rows(torch.eye(40)), cpu.pack(w))
    assert got.equal(values(w)[0].float().T)


@every_isa
@pytest.mark.parametrize("activations", [None, "int8"])
def test_sources_are_the_separate_ops(isa, activations):
    w = cpu.pack(weight("int4", 50, 64, 32, activations, zeros=True))
    x, norm = randn(5, 128), randn(64, seed=3)
    rows = torch.tensor([4, 0, 4], dtype=torch.int32)
    with instructions(isa):
        assert cpu.product(gated_rows(x), w).equal(cpu.product(plain_rows(cpu.silu_mul(x)), w))
        normed = cpu.rms_norm(x[:, :64], norm, 1e-5)
        assert cpu.product(normed_rows(x[:, :64], norm, 1e-5, rows), w).equal(
            cpu.product(plain_rows(normed[rows.long()]), w)
        )


# --- packing ---


@given(w=weights() | weights("int8"))
@settings(max_examples=120, deadline=None)
def test_unpack_is_the_inverse_of_pack(w):
    packed = cpu.pack(w)
    assert packed.layout == "cpu" and packed.group == w.group and packed.shape == w.shape
    plain = cpu.unpack(packed)
    assert plain.parts.keys() == w.parts.keys() and (plain.layout, plain.activations) == ("plain", w.activations)
    assert all(plain.parts[n].equal(w.parts[n]) and plain.parts[n].dtype is w.parts[n].dtype for n in w.parts)
    exact = values(w)[0].float()
    index = torch.arange(w.shape[0]).flip(0)
    torch.testing.assert_close(cpu.embedding(index, packed), exact[index], rtol=0 if w.activations else 2 * EPS, atol=0)
    with pytest.raises(IndexError, match="token id"):
        cpu.embedding(torch.tensor([w.shape[0]]), packed)


def test_nans_among_codes_survive_packing():
    whole = weight("fp8_e4m3", 96, 24, 24)
    whole.parts["codes"][70, 5] = 0xFF
    packed = cpu.pack(whole)
    assert packed.parts.keys() == {"codes", "scales", "nans"}
    assert cpu.unpack(packed).parts["codes"].equal(whole.parts["codes"])
    got = cpu.product(plain_rows(randn(3, 24)), packed)
    assert got[:, 70].isnan().all() and got.isnan().sum() == 3
    assert int(cpu.embedding(torch.tensor([70]), packed).isnan().sum()) == 1


def test_large_weights_are_aligned_and_right():
    w = weight("int8", 2100, 2048, 2048, "int8")
    packed = cpu.pack(w)
    assert packed.parts["codes"].data_ptr() % (1 << 21) == 0 and packed.nbytes >= 2100 * 2048
    assert cpu.unpack(packed).parts["codes"].equal(w.parts["codes"])


@pytest.mark.parametrize(("name", "activations"), [("nf4", None), ("int4", "int8")])
def test_what_no_kernel_serves_stays_plain(name, activations):
    odd, w = weight(name, 8, 48, 24, activations), weight(name, 8, 64, 32, activations)
    assert cpu.pack(odd) is odd and not cpu.serves(odd)
    packed = resolve("cpu").pack(w)
    assert packed.layout == "cpu" and resolve("cpu").pack(packed) is packed


@pytest.mark.parametrize(
    ("name", "part", "wrong", "error"),
    [
        ("fp8_e4m3", "codes", lambda t: t[:1], ValueError),
        ("fp8_e4m3", "codes", lambda t: t.view(torch.int8), TypeError),
        ("fp8_e4m3", "scales", lambda t: t[:1], ValueError),
        ("bf16", "weight", lambda t: t.half(), TypeError),
        ("bf16", "weight", lambda t: t[:, :1], ValueError),
        ("nf4", "scales", lambda t: t.double(), TypeError),
        ("int4", "codes", lambda t: t[:1], ValueError),
        ("int4", "codes", lambda t: t.view(torch.int8), TypeError),
        ("int4", "codes", lambda t: t.repeat(2, 1, 1, 1, 1)[::2], ValueError),
        ("int4", "scales", lambda t: t[:, :1], ValueError),
        ("int4", "zeros", lambda t: t[:1], ValueError),
        ("int4", "zeros", lambda t: t.int(), TypeError),
    ],
)
def test_corrupt_packed_tensors_are_refused(name, part, wrong, error):
    of_integers = name == "int4"
    w = cpu.pack(weight(name, 70, 96, 32 if of_integers else 96, "int8" if of_integers else None, zeros=of_integers))
    corrupt = replace(w, parts={**w.parts, part: wrong(w.parts[part])})
    for call in (lambda: cpu.product(plain_rows(randn(1, 96)), corrupt), lambda: cpu.unpack(corrupt)):
        with pytest.raises(error, match="pack it again"):
            call()
