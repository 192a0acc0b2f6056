"""Rows made ready for a product: those too wide for registers."""

from __future__ import annotations

import math

import pytest
import torch
from fixtures_ops import randn

from sameseed.ops import gated_rows
from sameseed.ops.triton import dispatch as host


@pytest.mark.bits
@pytest.mark.parametrize(
    ("form", "group"), [("single", 1), ("bf16", 320), ("half", 320), ("int8", 64), ("int8", 320), ("fp8", 64)]
)
def test_wide_gated_rows_have_the_bits_of_whole_ones(form, group, monkeypatch):
    x = 4 * randn(6, 640)
    x[1], x[2], x[3] = 0.0, x[2] * 2.0**-60, x[3] * 1e15
    x[4, 300], x[5, 500] = math.nan, math.inf
    whole, expected = host.preparation(gated_rows(x), form, group)
    monkeypatch.setattr(host, "MOST_AT_ONCE", 256)
    monkeypatch.setattr(host, "CHUNK", 128)
    parts, got = host.preparation(gated_rows(x), form, group)
    assert parts.constants["CHUNK"] == 128 and whole.constants["CHUNK"] == whole.constants["BLOCK"] == 512
    whole.run()
    parts.run()
    for a, b in ((got.values, expected.values), (got.scales, expected.scales)):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
