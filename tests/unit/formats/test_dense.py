"""The dense formats against the bits of IEEE 754."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, strategies as st

from sameseed import scheme
from sameseed.errors import ConfigError, RegistryError
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


@pytest.mark.parametrize(
    ("value", "expected"), [(1 + 2**-8, 1.0), (1 + 3 * 2**-8, 1 + 2**-6), (1 + 2**-8 + 2**-20, 1 + 2**-7)]
)
def test_bf16_ties_by_example(value, expected):
    assert through("bf16", value) == expected


@given(st.floats(-65504, 65504, width=32))
def test_fp16_is_ieee_half(value):
    assert through("fp16", value) == struct.unpack("<e", struct.pack("<e", value))[0]


def test_a_weight_beyond_fp16_is_refused_instead_of_becoming_infinite():
    scheme.get("fp16").encode(torch.tensor([[65504.0, -65504.0]]))
    with pytest.raises(ConfigError, match=r"70000 does not fit fp16 \(at most 65504\); use bf16"):
        scheme.get("fp16").encode(torch.tensor([[1.0, -70000.0]]))


def test_cache_rows_are_the_same_floats():
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
    for dtype, name in DENSE.items():
        codes, scales = scheme.get(name).encode_kv(x)
        assert scales is None and codes.dtype == dtype and codes.equal(x.to(dtype))
        assert scheme.get(name).decode_kv(codes, scales).equal(x.to(dtype).float())


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_auto_keeps_what_the_checkpoint_stores(dtype):
    weight = torch.randn(3, 8).to(dtype)
    q = QuantScheme().encode(weight)
    assert q.format == DENSE[dtype] and q.parts["weight"].equal(weight)


def test_unknown_format_names_the_near_one():
    with pytest.raises(RegistryError, match="did you mean 'bf16'"):
        scheme.get("bf61")
    with pytest.raises(RegistryError, match="fp32"):
        QuantScheme("float32").encode(torch.ones(1, 1))
