"""Parts of attention merged in ascending order: what programs left that took a span or a stretch of keys each.

By row and head: an element of a row's values meets no other, so who merges which elements changes nothing.
"""

# Kernels are Triton's language, not Python's: types and docstrings stay outside.
from __future__ import annotations

import triton
import triton.language as tl

from sameseed.ops.triton.softmax import blend, shares

AT_ONCE: tl.constexpr = tl.constexpr(8)  # parts of one step; the next step's are loaded meanwhile


@triton.jit(do_not_specialize=["num_parts"])
def combine(
    part_ptr, sums_ptr, bounds_ptr, out_ptr, num_parts, num_heads,
    SPANS: tl.constexpr, TWICE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Program (t, head). A part is SPANS spans; TWICE: AT_ONCE parts make a stretch, and stretches the whole.
    t = tl.program_id(0).to(tl.int64)
    place = t * num_heads + tl.program_id(1)
    first = tl.load(bounds_ptr + t * 2) // SPANS
    last = tl.cdiv(tl.load(bounds_ptr + t * 2 + 1), SPANS)
    dims = tl.arange(0, BLOCK)
    same = dims * 0  # sums are loaded by every element for itself: as tensors, which alone are loaded ahead
    o = tl.zeros((BLOCK,), tl.float32)
    m, mass = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(first // AT_ONCE * AT_ONCE, last, AT_ONCE, num_stages=3):
        in_m, in_l, in_o = m, mass, o
        if TWICE:
            in_m, in_l = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
            in_o = tl.zeros((BLOCK,), tl.float32)
        for step in tl.static_range(AT_ONCE):
            there = (start + step >= first) & (start + step < last)
            at = place * num_parts + start + step
            m_new = tl.load(sums_ptr + (at * 2 + same), mask=there, other=float("-inf"))
            l_new = tl.load(sums_ptr + (at * 2 + 1 + same), mask=there, other=0.0)
            o_new = tl.load(part_ptr + at * DIM + dims, mask=there & (dims < DIM), other=0.0)
            in_m, in_l, old, new, none, seen = shares(in_m, in_l, m_new, l_new)
            in_o = blend(in_o, o_new, old, new, none, seen)
        if TWICE:
            m, mass, old, new, none, seen = shares(m, mass, in_m, in_l)
            o = blend(o, in_o, old, new, none, seen)
        else:
            m, mass, o = in_m, in_l, in_o
    tl.store(out_ptr + place * DIM + dims, tl.div_rn(o, mass), mask=dims < DIM)
