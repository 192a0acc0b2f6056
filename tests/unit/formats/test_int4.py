"""int4: symmetric by absmax / 7.5, or with zero points; int4 and int8 are packed as in compressed-tensors."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hn

from sameseed import scheme
from sameseed.formats.int4 import pack_int32
from sameseed.models.layouts.base import unpacked
from sameseed.scheme import QuantArgs

INT4 = scheme.get("int4")


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


@given(hn.arrays("uint8", st.tuples(st.integers(1, 5), st.integers(1, 20)), elements=st.integers(0, 15)))
def test_eight_codes_an_int32(values):
    codes = torch.from_numpy(values)
    packed = pack_int32(codes)
    assert packed.dtype == torch.int32 and packed.shape == (codes.shape[0], -(-codes.shape[1] // 8))
    assert unpacked(packed, 4)[:, : codes.shape[1]].equal(codes)
    for row, word in zip(values, packed[:, 0].tolist(), strict=True):  # the first code is in the lowest four bits
        assert word % 2**32 == sum(int(c) << 4 * i for i, c in enumerate(row[:8]))


def test_int8_beside_float_activations_is_packed_too():
    """pack-quantized: four codes per int32, the first in its lowest bits, each with 128 added."""
    q = scheme.get("int8").encode(torch.randn(6, 10, generator=torch.Generator().manual_seed(0)))
    tensors = scheme.get("int8").checkpoint("x", q)
    assert set(tensors) == {"x.weight_packed", "x.weight_scale", "x.weight_shape"}
    assert tensors["x.weight_packed"].shape == (6, 3) and tensors["x.weight_shape"].tolist() == [6, 10]
    first = tensors["x.weight_packed"][0, 0].item() & 0xFFFFFFFF
    assert list(first.to_bytes(4, "little")) == [c + 128 for c in q.parts["codes"][0, :4].tolist()]
    assert scheme.get("int8").config(q)["format"] == "pack-quantized"
