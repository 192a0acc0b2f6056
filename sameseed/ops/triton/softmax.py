"""Blockwise softmax: adds a block of keys to the softmax of 16 queries, and merges partial softmaxes.

A cached row is read as two parts, each with its own matrix product. 8-bit codes are read as words of two codes, and the
parts are the even and the odd dimensions. For other formats the parts are the halves of the row. So codes become 16-bit
numbers in the layout of tensor core operands, without a shuffle. Float32 operands (queries and weights) of products
with 16-bit numbers are split into two 16-bit terms.
"""

# Kernels are written in Triton's language: they have no type annotations, and comments instead of docstrings.
from __future__ import annotations

import triton
import triton.language as tl

from sameseed.ops.triton.common import inverse, power_of, wait
from sameseed.ops.triton.decode import e4m3, e5m2, int8

TILE: tl.constexpr = tl.constexpr(16)  # queries per product: the smallest tile of tensor cores
AT_ONCE: tl.constexpr = tl.constexpr(8)  # spans per stretch, and the most stretches that are merged side by side
LIFT: tl.constexpr = tl.constexpr(2.0**15)  # weights, at most 1, are multiplied by it so that float16 holds small ones


@triton.jit
def shares(m, mass, m_new, l_new):
    # Maximum and sum of two merged partial softmaxes, and the arguments of `blend`. A partial softmax with sum 0 is
    # empty.
    top = tl.maximum(m, m_new)
    old, new = tl.exp2(m - top), tl.exp2(m_new - top)
    seen, first = l_new != 0.0, mass == 0.0
    both = tl.where(first, l_new, mass * old + l_new * new)
    m = tl.where(seen, tl.where(first, m_new, top), m)
    return m, tl.where(seen, both, mass), old, new, first, seen


@triton.jit
def blend(o, o_new, old, new, first, seen):
    # Merges the values of two partial softmaxes by the results of `shares`.
    return tl.where(seen, tl.where(first, o_new, o * old + o_new * new), o)


@triton.jit
def merge(state, more):
    # Merges two partial softmaxes of TILE queries: maxima and sums [TILE], and the two parts of values [TILE, BLOCK].
    m, mass, o0, o1 = state
    m_new, l_new, o0_new, o1_new = more
    m, mass, old, new, first, seen = shares(m, mass, m_new, l_new)
    old, new, first, seen = old[:, None], new[:, None], first[:, None], seen[:, None]
    return m, mass, blend(o0, o0_new, old, new, first, seen), blend(o1, o1_new, old, new, first, seen)


@triton.jit
def terms(x, DTYPE: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr):
    # x as the sum of two numbers of a shorter type; x itself if products use float32.
    if SPLIT:
        high = x.to(DTYPE)
        low = (x - high.to(tl.float32)).to(DTYPE)
        if WIDEN:  # the interpreter has no products of bfloat16
            high, low = high.to(tl.float32), low.to(tl.float32)
    else:
        high, low = x, x
    return high, low


@triton.jit
def _times(high, low, y, acc, SPLIT: tl.constexpr, WIDEN: tl.constexpr):
    # acc + (high + low) y; the small terms are added first.
    if WIDEN:
        y = y.to(tl.float32)
    if SPLIT:
        acc = tl.dot(low, y, acc, input_precision="ieee")
    return tl.dot(high, y, acc, input_precision="ieee")


@triton.jit
def _parts(
    rows_ptr, row, loaded,
    KIND: tl.constexpr, MACHINE: tl.constexpr, FLOAT8: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The two parts [KEYS, BLOCK] of cached rows as 16-bit numbers (float32 for fp32); zeros for rows that are not
    # loaded.
    HALF: tl.constexpr = (DIM + 1) // 2
    cols = tl.arange(0, BLOCK)
    inside = loaded[:, None] & (cols < HALF)[None, :]
    if KIND == "float":
        at = row[:, None] * DIM + cols[None, :]
        rest = loaded[:, None] & (cols < DIM - HALF)[None, :]
        first = tl.load(rows_ptr + at, mask=inside, other=0.0)
        second = tl.load(rows_ptr + (at + HALF), mask=rest, other=0.0)
    else:
        words = tl.load(rows_ptr + (row[:, None] * HALF + cols[None, :]), mask=inside, other=0)
        words = words.to(tl.uint16, bitcast=True)
        if KIND == "e4m3":
            first, second = e4m3(words, MACHINE, FLOAT8)
        elif KIND == "e5m2":
            first, second = e5m2(words, MACHINE)
        else:
            first, second = int8(words ^ 0x8080, MACHINE)  # `int8` expects codes + 128
    return first, second


@triton.jit
def step(
    queries, state, index, loaded, visible, sees, cache,
    KIND: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr, HALVES: tl.constexpr,
    MACHINE: tl.constexpr, FLOAT8: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Adds a block of keys, stored at `index` [KEYS], to the softmax of the queries that see some of it (`sees` [TILE]).
    q0_high, q0_low, q1_high, q1_low, q_power = queries
    m, mass, o0, o1 = state
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, kv_head, kv_heads = cache
    KEYS: tl.constexpr = index.shape[0]
    page = tl.load(table + index // PAGE, mask=loaded, other=0).to(tl.int64)
    row = (page * PAGE + index % PAGE) * kv_heads + kv_head  # [KEYS]
    k0, k1 = _parts(k_ptr, row, loaded, KIND, MACHINE, FLOAT8, DIM, BLOCK)
    scores = tl.zeros((TILE, KEYS), tl.float32)
    scores = _times(q0_high, q0_low, tl.trans(k0), scores, SPLIT, WIDEN)
    scores = _times(q1_high, q1_low, tl.trans(k1), scores, SPLIT, WIDEN) * q_power[:, None]
    if SCALED:
        scores = scores * tl.load(k_scale_ptr + row, mask=loaded, other=0.0)[None, :]
    scores = tl.where(visible, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, axis=1))
    weights = tl.where(visible, tl.exp2(scores - top[:, None]), 0.0)
    faded = tl.exp2(m - top)
    total = mass * faded + tl.sum(weights, axis=1)
    v0, v1 = _parts(v_ptr, row, loaded, KIND, MACHINE, FLOAT8, DIM, BLOCK)
    back = tl.full((TILE,), 1.0, tl.float32)
    if SCALED:
        # Weights times the values' scales can have any size. So they are divided by a power of two that depends only on
        # what this row sees.
        v_scale = tl.load(v_scale_ptr + row, mask=loaded, other=0.0)[None, :]
        weights = tl.where(visible, weights * v_scale, 0.0)
        bits = power_of(tl.max(weights, axis=1))
        weights, back = weights * inverse(bits)[:, None], bits.to(tl.float32, bitcast=True)
    elif HALVES:
        weights, back = weights * LIFT, back * (1.0 / LIFT)
    high, low = terms(weights, v0.dtype, SPLIT, WIDEN)
    mixed0 = _times(high, low, v0, tl.zeros((TILE, BLOCK), tl.float32), SPLIT, WIDEN)
    mixed1 = _times(high, low, v1, tl.zeros((TILE, BLOCK), tl.float32), SPLIT, WIDEN)
    mixed0 = o0 * faded[:, None] + mixed0 * back[:, None]
    mixed1 = o1 * faded[:, None] + mixed1 * back[:, None]
    o0, o1 = tl.where(sees[:, None], mixed0, o0), tl.where(sees[:, None], mixed1, o1)
    return tl.where(sees, top, m), tl.where(sees, total, mass), o0, o1


@triton.jit
def _halves(x):
    # The lower and upper half of a vector.
    return tl.split(tl.trans(tl.reshape(x, (2, x.shape[0] // 2))))


@triton.jit
def _ascend(m, mass, o, m_new, l_new, o_new):
    # Merges n consecutive partial softmaxes, [n * BLOCK], into one of [BLOCK], in ascending order.
    if m_new.shape[0] == m.shape[0]:
        m, mass, old, new, first, seen = shares(m, mass, m_new, l_new)
        o = blend(o, o_new, old, new, first, seen)
    else:
        m0, m1 = _halves(m_new)
        l0, l1 = _halves(l_new)
        o0, o1 = _halves(o_new)
        m, mass, o = _ascend(m, mass, o, m0, l0, o0)
        m, mass, o = _ascend(m, mass, o, m1, l1, o1)
    return m, mass, o


@triton.jit(do_not_specialize=["num_parts"])
def combine(
    part_ptr, sums_ptr, bounds_ptr, out_ptr, num_parts, num_heads,
    SPANS: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # Merges partial results of attention in ascending order, where each program took a span or a stretch of keys.
    # Elements of a row's values are merged independently, so the assignment of elements to programs changes no bits.
    # Program (t, head, dims). A part is SPANS spans, and PARTS parts are a stretch. LINES stretches are merged side by
    # side, then with each other in order. Every element loads its own sums, so nothing is exchanged before that.
    t = tl.program_id(0).to(tl.int64)
    place = t * num_heads + tl.program_id(1)
    wait(EARLY)
    # For rows that belong to no sequence, the bounds may be any numbers. They are clamped to the range of parts.
    first = tl.maximum(tl.load(bounds_ptr + t * 2) // SPANS, 0)
    last = tl.minimum(tl.cdiv(tl.load(bounds_ptr + t * 2 + 1), SPANS), num_parts)
    each = tl.arange(0, LINES * BLOCK)
    line, dims = each // BLOCK, tl.program_id(2) * BLOCK + each % BLOCK
    m, mass = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    o = tl.zeros((BLOCK,), tl.float32)
    for start in range(first // PARTS * PARTS, last, LINES * PARTS):
        loaded = ()  # all loads come before the first merge, so merging waits for memory once
        for i in tl.static_range(PARTS):
            part = start + line * PARTS + i
            there = (part >= first) & (part < last)
            at = place * num_parts + part
            m_new = tl.load(sums_ptr + at * 2, mask=there, other=float("-inf"))
            l_new = tl.load(sums_ptr + (at * 2 + 1), mask=there, other=0.0)
            loaded += ((m_new, l_new, tl.load(part_ptr + (at * DIM + dims), mask=there & (dims < DIM), other=0.0)),)
        st_m, st_l, st_o = loaded[0]
        for i in tl.static_range(1, PARTS):
            st_m, st_l, old, new, none, seen = shares(st_m, st_l, loaded[i][0], loaded[i][1])
            st_o = blend(st_o, loaded[i][2], old, new, none, seen)
        m, mass, o = _ascend(m, mass, o, st_m, st_l, st_o)
    dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + (place * DIM + dims), tl.div_rn(o, mass), mask=dims < DIM)
