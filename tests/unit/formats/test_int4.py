"""int4: symmetric by absmax / 7.5, or with zero points; packed as in compressed-tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hn

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.formats.int4 import pack_int32
from sameseed.models.layouts.base import unpacked
from sameseed.scheme import QuantArgs

INT4 = scheme.get("int4")
rows = hn.arrays("float32", st.tuples(st.integers(1, 4), st.just(64)), elements=st.floats(-1e4, 1e4, width=32))


@given(rows)
def test_error_is_about_half_a_step(values):
    """Half a step, plus what rounding the scale to bfloat16 (8 bits) moves at the ends: 2^-8 of 15 steps."""
    weight = torch.from_numpy(values)
    for symmetric in (True, False):
        q = INT4.encode(weight, QuantArgs(32, symmetric))
        assert q.parts["scales"].dtype == torch.bfloat16 and q.parts["codes"].max() <= 15
        step = q.parts["scales"].double().repeat_interleave(32, 1)
        error = (INT4.decode(q).double() - weight.double()).abs()
        assert (error <= step * (0.5 + 15 * 2**-8 + 2**-20) + 2**-90).all()


def test_codes_by_hand():
    weight = torch.tensor([[0.0, 1.0, -1.0, 7.0, -7.5, 7.5, 0.5, 1.5]])  # scale 1: ties go to even
    q = INT4.encode(weight, QuantArgs(8))
    assert q.parts["scales"].tolist() == [[1.0]]
    assert q.parts["codes"].tolist() == [[8, 9, 7, 15, 0, 15, 8, 10]]
    assert INT4.decode(q).tolist() == [[0, 1, -1, 7, -8, 7, 0, 2]]
    assert "zeros" not in q.parts


def test_zero_points_by_hand():
    weight = torch.tensor([[-3.0, 12.0, 0.0, 1.0], [1.0, 15.0, 2.0, 4.0], [-15.0, -1.0, -2.0, -4.0]])
    q = INT4.encode(weight, QuantArgs(4, symmetric=False))
    assert q.parts["zeros"].tolist() == [[3], [0], [15]]  # a range on one side of 0 is extended to 0
    assert q.parts["codes"].tolist() == [[0, 15, 3, 4], [1, 15, 2, 4], [0, 14, 13, 11]]
    assert INT4.decode(q).equal(weight)


def test_the_scale_is_rounded_before_the_codes():
    weight = torch.linspace(-1, 1, 32)[None]
    q = INT4.encode(weight, QuantArgs(32))
    scale = torch.tensor(1 / 7.5).to(torch.bfloat16).float()
    assert q.parts["scales"].float().item() == scale.item() != 1 / 7.5
    assert q.parts["codes"].equal(((weight / scale).round().clamp(-8, 7) + 8).to(torch.uint8))


def test_the_largest_group_that_divides():
    for width, group in ((256, 128), (192, 64), (96, 32), (72, 72), (8192, 128)):
        assert INT4.encode(torch.ones(1, width)).group == group
    with pytest.raises(ConfigError, match="groups of 32 do not divide rows of 72 values"):
        INT4.encode(torch.ones(1, 72), QuantArgs(32))


@given(hn.arrays("uint8", st.tuples(st.integers(1, 5), st.integers(1, 20)), elements=st.integers(0, 15)))
def test_eight_codes_an_int32(values):
    codes = torch.from_numpy(values)
    packed = pack_int32(codes)
    assert packed.dtype == torch.int32 and packed.shape == (codes.shape[0], -(-codes.shape[1] // 8))
    assert unpacked(packed, 4)[:, : codes.shape[1]].equal(codes)
    for row, word in zip(values, packed[:, 0].tolist(), strict=True):  # the first code is in the lowest four bits
        assert word % 2**32 == sum(int(c) << 4 * i for i, c in enumerate(row[:8]))


def test_checkpoint_layout_is_that_of_compressed_tensors():
    """pack-quantized: int32 [O, K / 8], bf16 scales, the shape, zero points packed along O."""
    q = INT4.encode(torch.randn(24, 512, generator=torch.Generator().manual_seed(0)), QuantArgs(128, False))
    tensors = {name.removeprefix("a.b."): t for name, t in INT4.checkpoint("a.b", q).items()}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "weight_packed": (torch.int32, (24, 64)),
        "weight_scale": (torch.bfloat16, (24, 4)),
        "weight_shape": (torch.int64, (2,)),
        "weight_zero_point": (torch.int32, (3, 4)),
    }
    config = INT4.config(q)
    assert config["format"] == "pack-quantized"
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 128, False)
