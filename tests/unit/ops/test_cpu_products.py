"""Packed weights times rows in the native backend: one body over kinds of weights and instruction sets.

Two oracles: float64 within a bound for rows of floats, and the reference's bits for rows in int8.
"""

from dataclasses import replace

import pytest
import torch
from fixtures_cpu import ISAS, instructions
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st

from sameseed import scheme
from sameseed.formats import int8n
from sameseed.ops import cpu, plain_rows, resolve
from sameseed.scheme import BLOCKS, KQUANTS, QuantScheme, QuantTensor

EPS = 2.0**-24
REFERENCE = resolve("reference")
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
LLAMA_CPP = KQUANTS | BLOCKS  # bits of a code
DENSE = ["fp32", "bf16", "fp16"]
FLOATS = [*DENSE, "int4", "int4-asym", "int8", "nf4", *FLOAT8]
INTEGERS = [
    "int4/int8", "int4-asym/int8", "int8/int8", "int8n/int8", "int8n-low/int8", *(f"{n}/int8" for n in LLAMA_CPP),
]  # fmt: skip
PAIRS = "bf16/bf16"
KINDS = [*FLOATS, *INTEGERS, PAIRS]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_integer = pytest.mark.parametrize("kind", INTEGERS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def groups(kind):
    """Sizes of groups that weights of this kind may have; None: whole rows, of any width."""
    name, _, activations = kind.partition("/")
    if name in LLAMA_CPP:
        return [256]
    if name.startswith("int") or name == "nf4":
        return [None, 32, 64, 128, *([] if activations else [160])]
    return [None]


def weight(kind, O, K, G=None, dtype=torch.bfloat16, seed=0):  # noqa: E741
    """A weight of random finite codes, including the extreme ones: name[-asym or -low][/activations]."""
    name, _, activations = kind.partition("/")
    rng = torch.Generator().manual_seed(seed)

    def ints(low, high, count, dtype):
        return torch.randint(low, high, (O, count), generator=rng).to(dtype)

    def scales(count):
        return ((torch.rand(O, count, generator=rng) - 0.3) * 0.01).to(dtype)

    if name in LLAMA_CPP:
        dtype = torch.float16 if dtype is torch.float32 else dtype
        count = K // (16 if name in ("q2_k", "q6_k") else 32)
        bounds = (-128, 128) if name == "q6_k" else (0, 64)
        supers = K // (256 if name in KQUANTS else 32)
        parts = {"codes": ints(0, 1 << LLAMA_CPP[name], K, torch.uint8), "scales": scales(supers)}
        parts |= {"least": scales(supers)} if "least" in scheme.get(name).scale_parts else {}
        if name in KQUANTS:
            parts["steps"] = ints(*bounds, count, torch.int8)
            parts |= {"minima": ints(*bounds, count, torch.int8)} if "least" in parts else {}
        return QuantTensor(name, (O, K), parts, "int8")
    if name in DENSE:
        encoded = QuantScheme.parse("bf16-a16") if activations else scheme.get(name)
        return encoded.encode(torch.randn(O, K, generator=rng))
    parts = {"scales": scales(K // (G or K))}
    if name.startswith("int8n"):
        made = int8n.FORMAT.stored(ints(-128, 120, K, torch.int8), parts["scales"].bfloat16())
        made = replace(made, activations="int8")
        return int8n.FORMAT.lower(made) if name == "int8n-low" else made
    if name in FLOAT8:
        parts["codes"] = torch.randn(O, K, generator=rng).to(FLOAT8[name]).view(torch.uint8)
    else:
        parts["codes"] = ints(-128, 128, K, torch.int8) if name == "int8" else ints(0, 16, K, torch.uint8)
    if name == "int4-asym":
        parts["zeros"] = ints(0, 16, K // (G or K), torch.uint8)
    return QuantTensor(name.removesuffix("-asym"), (O, K), parts, activations or None)


def packed(w):
    """As the backend stores it; dense weights for float rows stay as they are."""
    made = cpu.pack(w)
    assert cpu.serves(made)
    return made


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


def hold(kind, got, x, w, bias=None, residual=None):
    """Check a product against its oracle."""
    if kind in INTEGERS:
        assert same(got, REFERENCE.product(plain_rows(x), w, bias, residual))
    else:
        # Rows in bf16 flush subnormal numbers to zero.
        x, smallest = (x.bfloat16().float(), 2.0**-126) if kind == PAIRS else (x, 2.0**-149)
        exact = scheme.get(w.format).decode(w).double()
        size = exact.abs()
        if "zeros" in w.parts:  # kernels may sum codes and zeros apart
            shift = w.parts["scales"].double() * (8 - w.parts["zeros"].double())
            size = size + 2 * shift.abs().repeat_interleave(w.group, 1)
        wanted, bound = x.double() @ exact.T, x.double().abs() @ size.T
        if bias is not None and residual is not None:
            wanted, bound = wanted + bias + residual, bound + bias.abs() + residual.abs()
        K = w.shape[1]
        assert ((got.double() - wanted).abs() <= (K + 8) * (EPS * bound + smallest)).all()


@st.composite
def weights(draw):
    kind = draw(st.sampled_from(KINDS))
    group = draw(st.sampled_from(groups(kind)))
    K = draw(st.integers(1, 300)) if group is None else group * draw(st.integers(1, 5))
    O = draw(st.integers(1, 140))  # noqa: E741
    return kind, weight(kind, O, K, group, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999)))


@given(
    drawn=weights(),
    T=st.integers(0, 40),
    shift=st.integers(0, 3),
    added=st.booleans(),
    power=st.sampled_from([0, 0, -60, -100, -126, 60]),
)
@settings(max_examples=150, deadline=None)
def test_products_are_right_and_their_bits_belong_to_the_row(drawn, T, shift, added, power):
    """Values near both ends of float32's range too, in rows that are slices of wider ones."""
    kind, w = drawn
    O, K = w.shape  # noqa: E741
    x = (randn(T, K + 3, seed=K) * 2.0**power)[:, shift : shift + K]
    bias, residual = (randn(O, seed=1), randn(T, O, seed=2)) if added else (None, None)
    stored = packed(w)
    with instructions("portable"):
        wanted = cpu.product(plain_rows(x), stored, bias, residual)
    hold(kind, wanted, x, w, bias, residual)
    for isa in ISAS:
        with instructions(isa):
            assert cpu.product(plain_rows(x), stored, bias, residual).equal(wanted)
            for t in {0, T // 2, T - 1} & set(range(T)):
                row = None if residual is None else residual[t : t + 1]
                assert cpu.product(plain_rows(x[t : t + 1].clone()), stored, bias, row).equal(wanted[t : t + 1])


@pytest.mark.parametrize(
    ("kind", "K", "G"),
    [
        ("bf16", 520, None), ("int4-asym", 768, 128), ("int8", 1100, None), ("nf4", 512, 64), ("fp8_e4m3", 700, None),
        ("int4/int8", 1280, 128), ("int4/int8", 1100, None), ("int8/int8", 1100, None), ("int8/int8", 1024, 32),
        (PAIRS, 520, None), (PAIRS, 1100, None), ("int8n/int8", 1280, 128), ("int8n/int8", 1280, None),
        ("int8n-low/int8", 1280, 128), ("int8n-low/int8", 1280, None),
        *((f"{name}/int8", 1536, 256) for name in LLAMA_CPP),
    ],
)  # fmt: skip
def test_bits_belong_to_the_row(kind, K, G):
    """A row has the same bits alone, in tiles of any height, in panels of decoded or shared weights, and on threads."""
    w, x = packed(weight(kind, 161, K, G)), randn(300, K, seed=3)
    with instructions("portable"):
        wanted = torch.cat([cpu.product(plain_rows(x[t : t + 1]), w) for t in range(41)])
    for isa in ISAS:
        with instructions(isa):
            whole = cpu.product(plain_rows(x), w)
            assert whole[:41].equal(wanted)
            for count in range(1, 42):
                assert cpu.product(plain_rows(x[:count].clone()), w).equal(wanted[:count])
            with threads(2):
                assert cpu.product(plain_rows(x), w).equal(whole)
                assert cpu.product(plain_rows(x[:7]), w).equal(whole[:7])


TINY = [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 2.0**-130, 1e-20, 1.0, -1.0, 1e30, -1e30]
EXTREMES = [*TINY, 2.0**-101, 2.0**-100, 126.5, 127.5, 3.4e38, -3.4e38]


@every_kind
def test_broken_rows_stay_alone(kind):
    """A row with one NaN or infinity; its neighbours, denormals and large numbers, have the bits of rows alone."""
    w = weight(kind, 37, 512)
    x = randn(12, 512)
    numbers = torch.tensor(EXTREMES if kind in INTEGERS else TINY)
    x[0], x[2] = numbers.repeat(64)[:512], numbers.flip(0).repeat(64)[:512]
    x[1] *= 1e6
    x[3] = 0
    broken = [5, 7, 9]
    x[5, 17], x[7, 300], x[9, 511] = torch.nan, torch.inf, -torch.inf
    others = [t for t in range(12) if t not in broken]
    stored = packed(w)
    with instructions("portable"):
        whole = cpu.product(plain_rows(x), stored)
    hold(kind, whole[others], x[others], w)
    used = scheme.get(w.format).decode(w) != 0 if kind not in INTEGERS else torch.ones(37, 512)
    for t, column in zip(broken, (17, 300, 511)):
        assert not whole[t][used[:, column].bool()].isfinite().any()
    for isa in ISAS:
        with instructions(isa):
            alone = torch.cat([cpu.product(plain_rows(x[t : t + 1]), stored) for t in range(12)])
            many = cpu.product(plain_rows(x.repeat(3, 1)), stored)
            assert same(cpu.product(plain_rows(x), stored), whole)
        assert same(alone, whole) and same(many, whole.repeat(3, 1))


@every_integer
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_are_exact(kind, sign):
    """Codes, steps and minima have full size and one sign, so that saturation or overflow would show."""
    w, x = weight(kind, 40, 4096), sign * torch.ones(3, 4096)
    x[1, ::2] *= -1
    if w.format in LLAMA_CPP:
        ends = [(1 << LLAMA_CPP[w.format]) - 1]
    else:
        ends = [0, 15] if w.format == "int4" else [-128, 119] if w.format == "int8n" else [-128, 127]
    for part in w.parts.keys() & {"steps", "minima"}:
        w.parts[part].fill_(-128 if w.format == "q6_k" else 127)
    for code in ends:
        w.parts["high" if "high" in w.parts else "codes"].fill_(code)
        wanted = REFERENCE.product(plain_rows(x), w)
        for isa in ISAS:
            with instructions(isa):
                assert same(cpu.product(plain_rows(x), packed(w)), wanted)


@every_kind
def test_every_code_is_read_in_its_place(kind):
    """One column of x at a time is not zero, so each output shows that column's value and nothing else."""
    w = weight(kind, 45, 256)
    for part, fill in (("steps", 1), ("least", 0), ("scales", 1.0)):
        if part in w.parts:
            w.parts[part].fill_(fill)
    wanted = 127 * scheme.get(w.format).decode(w).T
    for isa in ISAS:
        with instructions(isa):
            got = cpu.product(plain_rows(127 * torch.eye(256)), packed(w))
        torch.testing.assert_close(got, wanted, rtol=0 if kind in INTEGERS else EPS, atol=0)


@pytest.mark.parametrize("name", sorted(FLOAT8))
@pytest.mark.parametrize("T", [1, 3, 30])
def test_every_float8_is_read_as_torch_reads_it(name, T):
    codes = torch.arange(256).to(torch.uint8)[:, None]
    exact = codes.view(FLOAT8[name]).float()
    w = cpu.pack(QuantTensor(name, (256, 1), {"codes": codes, "scales": torch.full((256, 1), 0.5)}))
    for isa in ISAS:
        with instructions(isa):
            assert same(cpu.product(plain_rows(torch.ones(T, 1)), w), (exact.T * 0.5).expand(T, 256))
            assert same(cpu.embedding(torch.arange(256), w), exact * 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_of_16_bits_is_read_as_torch_reads_it(dtype):
    codes = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(256, 256)
    w = QuantTensor("bf16" if dtype == torch.bfloat16 else "fp16", (256, 256), {"weight": codes})
    for isa in ISAS:
        with instructions(isa):
            assert same(cpu.embedding(torch.arange(256), w), codes.float())


def test_rows_in_bf16_add_up_in_pairs_of_columns():
    """The odd column first, each with one rounding: what other processors do, also where this one cannot."""
    w, x = weight(PAIRS, 37, 301), randn(9, 301)
    wanted, values, rows = torch.zeros(9, 37), w.parts["weight"].double(), x.bfloat16().double()
    for k in (column for pair in range(0, 301, 2) for column in (pair + 1, pair) if column < 301):
        wanted = (rows[:, k : k + 1] * values[:, k] + wanted.double()).float()  # float64 holds each sum
    for isa in ISAS:
        with instructions(isa):
            assert cpu.product(plain_rows(x), packed(w)).equal(wanted)


def test_subnormals_outside_of_the_sums_are_kept():
    """bf16 rows flush within a sum; bias and residual keep theirs, and so does the next product on this thread."""
    w, tiny = packed(weight(PAIRS, 8, 4)), torch.full((8,), 2.0**-140)
    one = QuantScheme("fp32").encode(torch.ones(1, 1))
    for isa in ISAS:
        with instructions(isa):
            got = cpu.product(plain_rows(torch.zeros(3, 4)), w, tiny, torch.zeros(3, 8))
            assert got.equal(tiny.repeat(3, 1))
            assert cpu.product(plain_rows(torch.full((1, 1), 2.0**-140)), one) > 0


@given(drawn=weights())
@settings(max_examples=150, deadline=None)
def test_unpack_is_the_inverse_of_pack(drawn):
    _, w = drawn
    stored = packed(w)
    plain = resolve("cpu").unpack(stored)
    assert plain.parts.keys() == w.parts.keys() and (plain.layout, plain.activations) == ("plain", w.activations)
    if "high" not in w.parts:  # a view's lower halves are not kept
        assert all(plain.parts[n].equal(w.parts[n]) and plain.parts[n].dtype is w.parts[n].dtype for n in w.parts)
    assert stored.shape == w.shape and ("scales" not in w.parts or stored.group == w.group)
    index = torch.arange(w.shape[0]).flip(0).int()
    exact = scheme.get(w.format).decode(w)[index.long()]
    torch.testing.assert_close(cpu.embedding(index, stored), exact, rtol=0 if w.activations else 2 * EPS, atol=0)
    with pytest.raises(IndexError, match="token id"):
        cpu.embedding(torch.tensor([w.shape[0]], dtype=torch.int32), stored)
    for name in stored.parts.keys() - {"channel"}:  # a kernel would read beyond the part
        with pytest.raises(ValueError, match=r"pack"):
            cpu.embedding(index, replace(stored, parts={**stored.parts, name: stored.parts[name][:0]}))


def test_numbers_that_are_none_survive_packing():
    whole = weight("fp8_e4m3", 96, 24)
    whole.parts["codes"][70, 5] = 0xFF
    stored = cpu.pack(whole)
    assert cpu.unpack(stored).parts["codes"].equal(whole.parts["codes"])
    got = cpu.product(plain_rows(randn(3, 24)), stored)
    assert got[:, 70].isnan().all() and got.isnan().sum() == 3
    assert int(cpu.embedding(torch.tensor([70]), stored).isnan().sum()) == 1
    floats = randn(8, 128)
    floats[2, 5] = torch.nan
    made = cpu.encode(floats, QuantScheme("int8n", activations="int8"))
    assert cpu.product(plain_rows(randn(1, 128)), made)[0].isnan().tolist() == [i == 2 for i in range(8)]


def test_large_weights_are_aligned_and_right():
    w = weight("int8/int8", 2100, 2048)
    stored = cpu.pack(w)
    assert stored.parts["codes"].data_ptr() % (1 << 21) == 0 and stored.nbytes >= 2100 * 2048
    assert cpu.unpack(stored).parts["codes"].equal(w.parts["codes"])


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_bits_beyond_a_code_do_not_count(name):
    """One of our files may hold any byte: kernels and reference must use the same bits of it."""
    w = weight(f"{name}/int8", 8, 256)
    w.parts["codes"].add_(1 << LLAMA_CPP[name])
    x = randn(2, 256)
    hold(f"{name}/int8", cpu.product(plain_rows(x), cpu.pack(w)), x, w)


def test_what_no_kernel_serves_stays_plain():
    odd = [weight("nf4", 8, 48, 24), weight("int4/int8", 8, 48, 24)]
    odd += [replace(weight(f"{name}/int8", 8, 256), activations=None) for name in LLAMA_CPP]
    odd += [scheme.get(name).encode(randn(8, 40)) for name in LLAMA_CPP]
    for w in odd:
        assert cpu.pack(w) is w and not cpu.serves(w)
    assert not cpu.serves(weight(PAIRS, 3, 4))  # left to the reference until it is packed
    stored = resolve("cpu").pack(weight("nf4", 8, 64, 32))
    assert stored.layout == "cpu" and resolve("cpu").pack(stored) is stored
