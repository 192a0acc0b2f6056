"""Weights encoded and packed in one native pass: bit for bit the formats' own encoding, packed."""

from __future__ import annotations

import pytest
import torch
from fixtures_cpu import every_isa, instructions
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st
from torch import Tensor

from sameseed import ops
from sameseed.ops import cpu
from sameseed.scheme import QuantScheme

KINDS = [("int8", True), ("int4", True), ("int4", False), ("int8n", True)]


def check(weight: Tensor, quant: QuantScheme) -> None:
    got, wanted = cpu.encode(weight, quant), cpu.pack(quant.encode(weight))
    assert (got.format, got.shape, got.activations, got.layout) == (wanted.format, wanted.shape, "int8", "cpu")
    assert got.parts.keys() == wanted.parts.keys()
    for name, part in wanted.parts.items():
        torch.testing.assert_close(got.parts[name], part, rtol=0, atol=0, equal_nan=True)


@every_isa
@given(
    kind=st.sampled_from(KINDS),
    O=st.integers(1, 70),
    group=st.sampled_from([None, 32, 64, 128]),
    width=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-37, 2.0**-100, 1e-4, 1.0, 1e4]),
)
@settings(max_examples=60)
def test_one_pass_gives_the_bits_of_encode_then_pack(isa, kind, O, group, width, dtype, size):  # noqa: E741
    """In half precision many values lie half-way between two codes; both ways must round them alike."""
    weight = (randn(O, width * (group or 17), seed=O) * size).to(dtype)
    weight[0] = 0
    with instructions(isa):
        check(weight, QuantScheme(kind[0], group, kind[1], "int8"))


@pytest.mark.parametrize(("name", "symmetric"), KINDS)
@pytest.mark.parametrize("group", [None, 32])
def test_ends_of_the_range(name, symmetric, group):
    """Constant, one-sided, half-way, NaN and tiny groups; strides; threads."""
    rows = [torch.full((64,), v) for v in (1.0, -1.0, 2.0**-101, 3e38, float("nan"), float("inf"), 0.0)]
    rows += [
        torch.arange(64) / 7.5,
        -torch.arange(64) / 15,
        torch.arange(-32, 32) / 254,
        torch.tensor([1.0, float("nan")] * 32),
    ]
    weight = torch.stack([r.float() for r in rows]).repeat(20, 2)[:, :64]
    with threads(2):
        check(weight, QuantScheme(name, group, symmetric, "int8"))


@pytest.mark.parametrize("name", ["w4a16", "nf4", "fp8", "bf16"])
def test_what_has_no_single_pass_is_encoded_and_packed(name):
    quant, cpu_ops = QuantScheme.parse(name), ops.resolve("cpu")
    weight = randn(40, 128)
    assert cpu.encode(weight, quant) is None
    got = cpu_ops.unpack(cpu_ops.encode(weight, quant))
    wanted = quant.encode(weight)
    assert all(got.parts[p].equal(wanted.parts[p]) for p in wanted.parts)
