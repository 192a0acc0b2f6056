"""Attention over a cache in bf16_a16: queries and softmax weights rounded to bf16, products by pairs.

Values are compared with float64 for the same rounded queries. The error of rounded softmax weights stays within
`attention_rounding`. A row's bits do not depend on the other rows or the instruction set.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures_cpu import every_isa, hold_long, hold_order, hold_rows, instructions, spoiled
from fixtures_ops import Part, Pass, exact_attention, flat, make_pass, passes
from hypothesis import given, settings
from torch import Tensor

from sameseed.ops import cpu, reference

NAME = "bf16_a16"


def near(got: Tensor, p: Pass, scale: float, window: int | None = None) -> bool:
    """Whether the result is that for rounded queries, within the error of rounded softmax weights."""
    rounded = replace(p, q=(p.q * scale).bfloat16().float())
    largest = float(flat(p.layer)[1].float().nan_to_num(0.0).abs().max())
    error = (got.double() - exact_attention(rounded, 1.0, window)).abs().max()
    return float(error) <= (cpu.attention_rounding(NAME) + 1e-5) * largest


@every_isa
@given(drawn=passes([NAME], [2, 10, 32, 33, 64, 80, 128]))
@settings(max_examples=50, deadline=None)
def test_attention_is_right_and_its_bits_belong_to_the_row(isa, drawn):
    hold_rows(isa, *drawn, near)


@every_isa
def test_one_row_over_a_long_context(isa):
    hold_long(isa, NAME, near)


@every_isa
@pytest.mark.parametrize("window", [None, 1200])
def test_the_order_of_a_walk_leaves_no_trace(isa, window):
    hold_order(isa, NAME, window, near)


@every_isa
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("parents", [[], [-1, 0, 0, 2]])
@pytest.mark.parametrize("slot", [9, 14])
def test_what_a_row_does_not_see_cannot_touch_it(isa, broken, parents, slot):
    """Rows of a chunk share tiles and pairs of keys; a NaN or infinity must not change the rows before it."""
    with instructions(isa):
        p, clean, first = spoiled(NAME, slot, parents, broken, slice(2))
        got = cpu.attention(p.q, p.layer, p.batch, 0.3)
    assert got[:first].equal(clean[:first]) and not got[first].isfinite().any()


def test_the_reference_rounds_queries():
    p = make_pass([Part(40, 3)], NAME, heads=4, kv_heads=2, dim=32)
    assert near(reference.attention(p.q, p.layer, p.batch, 0.2), p, 0.2)
    error = (reference.attention(p.q, p.layer, p.batch, 0.2) - cpu.attention(p.q, p.layer, p.batch, 0.2)).abs().max()
    assert (
        0 < float(error) <= cpu.attention_rounding(NAME) * float(flat(p.layer)[1].float().nan_to_num(0.0).abs().max())
    )
