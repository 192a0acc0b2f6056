"""Weights rounded and packed in one native pass: the codes and scales of the formats' definitions, bit for bit."""

from __future__ import annotations

import pytest
import torch
from fixtures_cpu import every_isa, instructions
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st
from torch import Tensor

from sameseed import ops
from sameseed.ops import _packed, cpu
from sameseed.scheme import QuantScheme, QuantTensor

SMALLEST = 2.0**-100


def scales_of(size: Tensor, steps: float) -> Tensor:
    kept = torch.where(size >= SMALLEST, size / steps, torch.zeros_like(size))
    return torch.where(size.isfinite(), kept, torch.full_like(size, torch.nan)).to(torch.bfloat16)


def over(x: Tensor, scales: Tensor) -> Tensor:
    """x [O, K / G, G] over scales [O, K / G], to nearest even; 0 where there is no scale."""
    wide = scales.float()[..., None]
    return torch.where(wide > 0, (x / wide).round(), torch.zeros_like(x))


def encoded(weight: Tensor, name: str, group: int | None, symmetric: bool) -> QuantTensor:
    """The definition: int8 by row, int8 by group, int4 symmetric, int4 with zero points."""
    x = weight.float().view(weight.shape[0], -1, group or weight.shape[1])
    most = x.abs().amax(-1)
    zeros = None
    if name == "int8" and group is None:
        used = most.isfinite() & (most >= SMALLEST)
        codes = torch.where(
            used[..., None], (x * (torch.full_like(most, 127.0) / most)[..., None]).round(), torch.zeros_like(x)
        )
        scales = torch.where(used, most / 127.0, torch.where(most.isfinite(), 0.0, torch.nan))
    elif name == "int8":
        scales = scales_of(most, 127.0)
        codes = over(x, scales).clamp(-127, 127)
    elif symmetric:
        scales = scales_of(most, 7.5)
        codes = over(x, scales).clamp(-8, 7) + 8
    else:
        low, high = x.amin(-1).clamp(max=0.0), x.amax(-1).clamp(min=0.0)
        scales = scales_of(high / 15 - low / 15, 1.0)
        zeros = over(-low[..., None], scales).clamp(0, 15)
        codes = (over(x, scales) + zeros).clamp(0, 15)
        zeros = zeros[..., 0].to(torch.uint8)
    parts = {"codes": codes.flatten(1).to(torch.int8 if name == "int8" else torch.uint8), "scales": scales}
    return QuantTensor(name, tuple(weight.shape), parts | ({} if zeros is None else {"zeros": zeros}), "int8")


def equal(a: QuantTensor, b: QuantTensor) -> bool:
    pairs = [(a.parts[n], b.parts[n]) for n in a.parts]
    return a.parts.keys() == b.parts.keys() and all(
        x.dtype is y.dtype and torch.equal(x.float().nan_to_num(nan=-7e30), y.float().nan_to_num(nan=-7e30))
        for x, y in pairs
    )


kinds = st.sampled_from([("int8", True), ("int4", True), ("int4", False)])


@every_isa
@given(
    kind=kinds,
    O=st.integers(1, 70),
    group=st.sampled_from([None, 32, 64, 128]),
    width=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-37, 2.0**-100, 1e-4, 1.0, 1e4]),
)
@settings(max_examples=40)
def test_codes_and_scales_are_those_of_the_definition(isa, kind, O, group, width, dtype, size):  # noqa: E741
    weight = (randn(O, width * (group or 17), seed=O) * size).to(dtype)
    weight[0] = 0
    with instructions(isa):
        got = _packed.encode(weight, kind[0], group, kind[1])
    wanted = encoded(weight, kind[0], group, kind[1])
    assert equal(cpu.unpack(got), wanted)
    assert equal(got, cpu.pack(wanted)) and got.layout == "cpu" and got.activations == "int8"


@pytest.mark.parametrize(("name", "symmetric"), [("int8", True), ("int4", True), ("int4", False)])
@pytest.mark.parametrize("group", [None, 32])
def test_ends_of_the_range(name, symmetric, group):
    """Constant, one-sided, halfway, broken and tiny groups; strides; threads."""
    rows = [torch.full((64,), v) for v in (1.0, -1.0, 2.0**-101, 3e38, float("nan"), float("inf"), 0.0)]
    rows += [
        torch.arange(64) / 7.5,
        -torch.arange(64) / 15,
        torch.arange(-32, 32) / 254,
        torch.tensor([1.0, float("nan")] * 32),
    ]
    weight = torch.stack([r.float() for r in rows]).repeat(20, 2)[:, :64]
    with threads(2):
        assert equal(
            cpu.unpack(_packed.encode(weight, name, group, symmetric)),
            encoded(weight.contiguous(), name, group, symmetric),
        )


def test_what_cannot_be_stored_is_refused():
    with pytest.raises(ValueError, match="choose 32, 64 or 128"):
        _packed.encode(randn(4, 48), "int4", 24)
    with pytest.raises(ValueError, match="choose 32, 64 or 128"):
        _packed.encode(randn(4, 64), "int8", 32, symmetric=False)
    with pytest.raises(ValueError, match="cannot be stored"):
        _packed.encode(randn(4, 64).double(), "int4", 32)


@pytest.mark.parametrize("name", ["w8a8", "w8a8-g32", "w4a8", "w4a8-g64", "w4a8-asym"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pass_gives_the_bits_of_encode_then_pack(name, dtype):
    """In half precision many values lie half-way between two codes: both must round them alike."""
    quant, cpu_ops = QuantScheme.parse(name), ops.resolve("cpu")
    weight = randn(70, 256, seed=3).to(dtype)
    got, wanted = cpu_ops.encode(weight, quant), cpu_ops.pack(quant.encode(weight))
    assert (got.format, got.shape, got.activations, got.layout) == (wanted.format, wanted.shape, "int8", "cpu")
    assert got.parts.keys() == wanted.parts.keys()
    assert all(got.parts[p].equal(wanted.parts[p]) and got.parts[p].dtype == wanted.parts[p].dtype for p in got.parts)


@pytest.mark.parametrize("name", ["w4a16", "nf4", "fp8", "bf16"])
def test_what_has_no_single_pass_is_encoded_and_packed(name):
    quant, cpu_ops = QuantScheme.parse(name), ops.resolve("cpu")
    weight = randn(40, 128)
    assert cpu.encode(weight, quant) is None
    got = cpu_ops.unpack(cpu_ops.encode(weight, quant))
    wanted = quant.encode(weight)
    assert all(got.parts[p].equal(wanted.parts[p]) for p in wanted.parts)
