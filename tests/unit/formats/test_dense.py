"""The dense formats against the bits of IEEE 754."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, strategies as st

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.scheme import DENSE, QuantScheme

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def through(name: str, value: float) -> float:
    fmt = scheme.get(name)
    return fmt.decode(fmt.encode(torch.tensor([[value]]))).item()


@given(floats)
def test_fp32_keeps_every_bit(value):
    assert struct.pack("<f", through("fp32", value)) == struct.pack("<f", value)


def bf16_by_hand(value: float) -> int:
    """The upper half of the float32 bits, rounded to nearest, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@given(floats)
def test_bf16_rounds_to_nearest_even(value):
    q = scheme.get("bf16").encode(torch.tensor([[value]]))
    assert q.parts["weight"].view(torch.int16).item() & 0xFFFF == bf16_by_hand(value)


@given(st.floats(-65504, 65504, width=32))
def test_fp16_is_ieee_half(value):
    assert through("fp16", value) == struct.unpack("<e", struct.pack("<e", value))[0]


def test_a_weight_beyond_fp16_is_refused_instead_of_becoming_infinite():
    scheme.get("fp16").encode(torch.tensor([[65504.0, -65504.0]]))
    with pytest.raises(ConfigError, match=r"use bf16"):
        scheme.get("fp16").encode(torch.tensor([[1.0, -70000.0]]))


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_auto_keeps_what_the_checkpoint_stores(dtype):
    weight = torch.randn(3, 8).to(dtype)
    q = QuantScheme().encode(weight)
    assert q.format == DENSE[dtype] and q.parts["weight"].equal(weight)
