"""fp8: all 256 codes of both kinds, rounding and saturation; scales by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from foretoken.errors import ConfigError
from foretoken.formats import scheme

KINDS = {"fp8_e4m3": (4, 3, 448.0, torch.float8_e4m3fn), "fp8_e5m2": (5, 2, 57344.0, torch.float8_e5m2)}
every_kind = pytest.mark.parametrize("name", KINDS)


def by_hand(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Value of an 8-bit float by its definition (OCP 8-bit floating point specification, 1.0)."""
    sign = -1.0 if code >> 7 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    if exponent == (1 << exponent_bits) - 1 and (exponent_bits == 5 or mantissa == 7):
        return sign * math.inf if exponent_bits == 5 and mantissa == 0 else math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@every_kind
def test_all_codes(name):
    exponent_bits, mantissa_bits, _, dtype = KINDS[name]
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = torch.tensor([by_hand(c, exponent_bits, mantissa_bits) for c in range(256)])
    got = scheme.get(name).decode_kv(codes[:, None], torch.ones(256))[:, 0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got, codes.view(dtype).float(), rtol=0, atol=0, equal_nan=True)


@every_kind
def test_finite_codes_are_encoded_as_themselves(name):
    largest = KINDS[name][2]
    values = scheme.get(name).decode_kv(torch.arange(256, dtype=torch.uint8)[:, None], torch.ones(256))[:, 0]
    values = values[values.isfinite()]
    row = torch.cat([values, torch.tensor([largest])])[None, None]  # absmax is the largest: the scale is 1
    codes, scales = scheme.get(name).encode_kv(row)
    assert scales.item() == 1.0
    assert scheme.get(name).decode_kv(codes, scales).equal(row)


@every_kind
@given(st.floats(-1, 1, width=32))
def test_rounding_is_to_the_nearest_and_never_beyond(name, share):
    exponent_bits, mantissa_bits, largest, _ = KINDS[name]
    value = share * largest
    codes, scales = scheme.get(name).encode_kv(torch.tensor([[[value, largest]]]))
    got = scheme.get(name).decode_kv(codes, scales)[0, 0, 0].item()
    known = [by_hand(c, exponent_bits, mantissa_bits) for c in range(256)]
    exact = torch.tensor(value).item()
    assert abs(got - exact) == min(abs(k - exact) for k in known if math.isfinite(k))


@every_kind
def test_ties_go_to_even(name):
    _, mantissa_bits, largest, _ = KINDS[name]
    step = 2.0**-mantissa_bits
    row = torch.tensor([[[1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, largest]]])
    got = scheme.get(name).decode_kv(*scheme.get(name).encode_kv(row))
    assert got[0, 0, :3].tolist() == [1.0, 1 + 2 * step, -1.0]


@every_kind
def test_scales_of_weights_and_cache_rows(name):
    largest = KINDS[name][2]
    q = scheme.get(name).encode(torch.tensor([[1.0, -2.0], [0.0, 0.0], [1e-31, 0.0]]))
    assert q.parts["scales"].tolist() == [[torch.tensor(2.0 / largest).item()], [0.0], [0.0]]
    assert q.parts["codes"].dtype == torch.uint8 and q.parts["scales"].dtype == torch.float32
    codes, scales = scheme.get(name).encode_kv(torch.tensor([[[1.0, 3.0], [math.nan, 1.0]], [[math.inf, 1.0], [0, 0]]]))
    assert scales[0, 0] == torch.tensor(3.0) / largest and scales[0, 1].isnan() and scales[1, 0].isnan()
    assert scales[1, 1] == 0 and not codes[0, 1].any() and not codes[1].any()


def test_checkpoints():
    fmt, other = scheme.get("fp8_e4m3"), scheme.get("fp8_e5m2")
    q = fmt.encode(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))
    tensors = fmt.checkpoint("x", q)
    assert tensors["x.weight"].dtype == torch.float8_e4m3fn and tensors["x.weight_scale"].shape == (6, 1)
    assert fmt.config(q)["format"] == "float-quantized"
    with pytest.raises(ConfigError, match=r"x.weight is torch.float8_e4m3fn.* it is no fp8_e5m2"):
        other.from_checkpoint("x", tensors)
    with pytest.raises(ConfigError, match=r"no tensor x.weight_scale"):
        fmt.from_checkpoint("x", {"x.weight": tensors["x.weight"]})
    whole = fmt.from_checkpoint("x", {"x.weight": tensors["x.weight"], "x.weight_scale": torch.tensor([0.5])})
    assert whole.parts["scales"].tolist() == [[0.5]] * 6  # one scale for the tensor
