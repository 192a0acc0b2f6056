"""Products of weights in llama.cpp's blocks of 256 and of 32: the reference's bits on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fixtures_cpu import every_isa, instructions
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st

from sameseed import scheme
from sameseed.ops import cpu, gated_rows, normed_rows, plain_rows, resolve
from sameseed.scheme import BLOCKS, KQUANTS, QuantTensor

pytestmark = pytest.mark.bits

REFERENCE = resolve("reference")
NAMES = [*KQUANTS, *BLOCKS]
BITS = KQUANTS | BLOCKS
every_name = pytest.mark.parametrize("name", NAMES)


def weight(name: str, O: int, K: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> QuantTensor:  # noqa: E741
    """A weight of random codes and steps, including the extreme ones."""
    rng = torch.Generator().manual_seed(seed)
    parts = K // (16 if name in ("q2_k", "q6_k") else 32)
    low, high = (-128, 128) if name == "q6_k" else (0, 64)

    def scales() -> torch.Tensor:
        return ((torch.rand(O, K // (256 if name in KQUANTS else 32), generator=rng) - 0.3) * 0.01).to(dtype)

    def multiples() -> torch.Tensor:
        return torch.randint(low, high, (O, parts), generator=rng).to(torch.int8)

    found = {"codes": torch.randint(0, 1 << BITS[name], (O, K), generator=rng).to(torch.uint8), "scales": scales()}
    found |= {"least": scales()} if "least" in scheme.get(name).scale_parts else {}
    if name in KQUANTS:
        found |= {"steps": multiples()} | ({"minima": multiples()} if "least" in found else {})
    return QuantTensor(name, (O, K), found, "int8")


@every_isa
@given(
    name=st.sampled_from(NAMES),
    supers=st.integers(1, 4),
    O=st.integers(1, 70),
    T=st.integers(0, 30),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_products_are_those_of_the_reference(isa, name, supers, O, T, dtype):  # noqa: E741
    K = 256 * supers
    w, x, bias, residual = weight(name, O, K, O, dtype), randn(T, K, seed=K), randn(O, seed=1), randn(T, O, seed=2)
    wanted = REFERENCE.product(plain_rows(x), w, bias, residual)
    with instructions(isa):
        assert cpu.product(plain_rows(x), cpu.pack(w), bias, residual).equal(wanted)


@every_isa
@every_name
def test_rows_in_any_number_have_the_same_bits(isa, name):
    """Law 1: alone, in tiles of any height, in several tiles, on two threads, on another instruction set."""
    w, x = cpu.pack(weight(name, 161, 1536)), randn(300, 1536, seed=3)
    with instructions("portable"):
        wanted = torch.cat([cpu.product(plain_rows(x[t : t + 1]), w) for t in range(41)])
    with instructions(isa):
        whole = cpu.product(plain_rows(x), w)
        assert whole[:41].equal(wanted)
        for count in range(1, 42):
            assert cpu.product(plain_rows(x[:count].clone()), w).equal(wanted[:count])
        with threads(2):
            assert cpu.product(plain_rows(x), w).equal(whole)
            assert cpu.product(plain_rows(x[:7]), w).equal(whole[:7])


@every_isa
@every_name
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_are_exact(isa, name, sign):
    """Codes, steps and minima have full size and one sign, so that saturation or overflow would show."""
    w = weight(name, 40, 512)
    w.parts["codes"].fill_((1 << BITS[name]) - 1)
    for part in w.parts.keys() & {"steps", "minima"}:
        w.parts[part].fill_(-128 if name == "q6_k" else 127)
    x = sign * torch.ones(3, 512)
    x[1, ::2] *= -1
    wanted = REFERENCE.product(plain_rows(x), w)
    with instructions(isa):
        assert cpu.product(plain_rows(x), cpu.pack(w)).equal(wanted)


@every_isa
@every_name
def test_every_code_is_read_in_its_place(isa, name):
    """One column of x at a time is not zero, so each output shows that column's value and nothing else."""
    w = weight(name, 33, 256)
    for part, fill in (("steps", 1), ("least", 0), ("scales", 1.0)):
        if part in w.parts:
            w.parts[part].fill_(fill)
    with instructions(isa):
        got = cpu.product(plain_rows(127 * torch.eye(256)), cpu.pack(w))
    assert got.equal(127 * scheme.get(name).decode(w).T)


@every_isa
@every_name
def test_sources_are_the_separate_ops(isa, name):
    w = cpu.pack(weight(name, 50, 256))
    x, norm = randn(5, 512), randn(256, seed=3)
    rows = torch.tensor([4, 0, 4], dtype=torch.int32)
    with instructions(isa):
        assert cpu.product(gated_rows(x), w).equal(cpu.product(plain_rows(cpu.silu_mul(x)), w))
        normed = cpu.rms_norm(x[:, :256], norm, 1e-5)
        got = cpu.product(normed_rows(x[:, :256], norm, 1e-5, rows), w)
        assert got.equal(cpu.product(plain_rows(normed[rows.long()]), w))


@every_isa
@every_name
def test_broken_rows_stay_alone(isa, name):
    w, x = cpu.pack(weight(name, 37, 512)), randn(9, 512)
    x[1] *= 1e6
    x[3] = 0
    x[5, 17], x[7, 300] = torch.nan, torch.inf
    with instructions(isa):
        whole = cpu.product(plain_rows(x), w)
        alone = torch.cat([cpu.product(plain_rows(x[t : t + 1]), w) for t in range(9)])
    broken = torch.zeros(9, dtype=torch.bool)
    broken[[5, 7]] = True
    assert whole.isnan().all(1).equal(broken) and whole[~broken].isfinite().all()
    assert whole[~broken].equal(alone[~broken])


@every_name
@pytest.mark.parametrize("outputs", [1, 32, 70])
def test_packing_and_back_and_rows_of_an_embedding(name, outputs):
    w = weight(name, outputs, 512)
    packed = cpu.pack(w)
    assert packed.layout == "cpu" and cpu.serves(packed) and packed.group == w.group
    back = cpu.unpack(packed)
    assert back.parts.keys() == w.parts.keys() and all(back.parts[p].equal(w.parts[p]) for p in w.parts)
    ids = torch.arange(outputs).flip(0).int()
    assert cpu.embedding(ids, packed).equal(scheme.get(name).decode(w)[ids.long()])
    with pytest.raises(IndexError, match="token id"):
        cpu.embedding(torch.tensor([outputs], dtype=torch.int32), packed)


@every_name
def test_bits_beyond_a_code_do_not_count(name):
    """One of our files may hold any byte: kernels and reference must use the same bits of it."""
    w = weight(name, 8, 256)
    w.parts["codes"].add_(1 << BITS[name])
    x = randn(2, 256)
    assert cpu.product(plain_rows(x), cpu.pack(w)).equal(REFERENCE.product(plain_rows(x), w))


@every_name
def test_what_no_kernel_serves_stays_plain(name):
    for other in (replace(weight(name, 8, 256), activations=None), scheme.get(name).encode(randn(8, 40))):
        assert cpu.pack(other) is other and not cpu.serves(other)
    assert cpu.has_kernel(name, "int8") and not cpu.has_kernel(name, None)


@pytest.mark.parametrize(
    ("name", "part", "wrong", "error"),
    [
        ("q4_k", "codes", lambda t: t[:1], ValueError),
        ("q2_k", "codes", lambda t: t[:, :8], ValueError),
        ("q6_k", "codes", lambda t: t.view(torch.int8), TypeError),
        ("q5_k", "high", lambda t: t[:, :1], ValueError),
        ("q6_k", "high", lambda t: t.int(), TypeError),
        ("q6_k", "steps", lambda t: t[:1], ValueError),
        ("q4_k", "minima", lambda t: t.view(torch.uint8), TypeError),
        ("q4_k", "least", lambda t: t.float(), TypeError),
        ("q5_k", "scales", lambda t: t[:, :0], ValueError),
        ("q5_0", "high", lambda t: t[:1], ValueError),
        ("q5_1", "high", lambda t: t.view(torch.int8), TypeError),
        ("q4_1", "least", lambda t: t.bfloat16(), TypeError),
        ("iq4_nl", "codes", lambda t: t[:, :8], ValueError),
    ],
)
def test_corrupt_packed_tensors_are_refused(name, part, wrong, error):
    w = cpu.pack(weight(name, 70, 256))
    corrupt = replace(w, parts={**w.parts, part: wrong(w.parts[part])})
    for call in (lambda: cpu.product(plain_rows(randn(1, 256)), corrupt), lambda: cpu.unpack(corrupt)):
        with pytest.raises(error, match="pack it again"):
            call()
