"""Attention over a cache in int8_a8: queries in int8, softmax weights in 16 bits, products of integers.

Values are compared with float64 for the same quantized queries. The error of rounded softmax weights stays within
`attention_rounding`, and for noise far below it. A row's bits do not depend on the other rows or the instruction set.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures_cpu import every_isa, hold_long, hold_order, hold_rows, instructions, spoiled
from fixtures_ops import Part, Pass, exact_attention, flat, make_pass, passes
from hypothesis import given, settings
from torch import Tensor

from sameseed import scheme
from sameseed.ops import cpu, reference

NAME = "int8_a8"
OF_NOISE = 5e-4  # half a step is 1.5e-5; of 256 keys, as many are rounded up as down


def largest(p: Pass) -> float:
    """The largest absolute value of the cache's values."""
    tensors = flat(p.layer)
    return float(scheme.get(NAME).decode_kv(tensors[1], tensors[3]).nan_to_num(0.0).abs().max())


def near(got: Tensor, p: Pass, scale: float, window: int | None = None) -> bool:
    """Whether the result is that for quantized queries, within the error of rounded softmax weights."""
    error = float((got.double() - exact_attention(p, scale, window)).abs().max())
    return error <= min(OF_NOISE, cpu.attention_rounding(NAME)) * largest(p)


@every_isa
@given(drawn=passes([NAME], [1, 10, 16, 33, 64, 80, 128, 320]))
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
def test_the_largest_sums_fit(isa):
    """All codes are 127 and all weights equal: sums of 256 times 32767 times 127, and 512 times 127 times 127."""
    p = make_pass([Part(300, 1)], NAME, heads=2, kv_heads=1, dim=512, block_size=16)
    for codes in flat(p.layer)[:2]:
        codes.fill_(127)
    for scales in flat(p.layer)[2:]:
        scales.fill_(1.0)
    with instructions(isa):
        assert cpu.attention(p.q.fill_(-3.0), p.layer, p.batch, 1.0).sub(127).abs().max() < 1e-4


@every_isa
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("parents", [[], [-1, 0, 0, 2]])
@pytest.mark.parametrize("slot", [9, 14])
def test_what_a_row_does_not_see_cannot_touch_it(isa, broken, parents, slot):
    """Rows of a chunk share tiles and pairs of keys; a NaN or infinity must not change the rows before it."""
    with instructions(isa):
        p, clean, first = spoiled(NAME, slot, parents, broken, slice(2, None))
        got = cpu.attention(p.q, p.layer, p.batch, 0.3)
        # The same holds for a query: a bad value spoils only its own row and head.
        p.q[first, 2, 0] = broken
        worse = cpu.attention(p.q, p.layer, p.batch, 0.3)
    assert got[:first].equal(clean[:first]) and not got[first].isfinite().any()
    assert worse[:first].equal(clean[:first]) and not worse[first, 2].isfinite().any()


@every_isa
def test_values_of_zero_give_zero(isa):
    p = make_pass([Part(40, 3)], NAME, heads=4, kv_heads=2, dim=32)
    p = replace(p, layer=replace(p.layer, v_scale=p.layer.v_scale * 0))
    with instructions(isa):
        assert (cpu.attention(p.q, p.layer, p.batch, 0.2) == 0).all()


def test_the_reference_quantizes_queries():
    p = make_pass([Part(40, 3)], NAME, heads=4, kv_heads=2, dim=32)
    wanted = reference.attention(p.q, p.layer, p.batch, 0.2)
    assert near(wanted, p, 0.2)
    assert 0 < float((wanted - cpu.attention(p.q, p.layer, p.batch, 0.2)).abs().max()) <= OF_NOISE * largest(p)
