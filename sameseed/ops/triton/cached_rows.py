"""Kernels of the KV cache: they encode rows into the cache, with rotation if wanted, and copy rows as bytes.

A program reads one row of one head and nothing else. Scales are per token and head, so rejected draft tokens
leave no trace.
"""

# Kernels are written in Triton's language: they have no type annotations, and comments instead of docstrings.
from __future__ import annotations

import triton
import triton.language as tl

from sameseed.ops.triton.common import ROUND, SMALLEST, bfloat, wait


@triton.jit
def _float8(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    # Bits of the 8-bit float nearest to y (ties to even). |y| must not exceed the largest 8-bit float.
    TINY: tl.constexpr = 1 - BIAS - MANTISSA  # exponent of the step between subnormals
    exponent = y.to(tl.int32, bitcast=True) & 0x7F800000
    step = tl.maximum(exponent - (MANTISSA << 23), (127 + TINY) << 23).to(tl.float32, bitcast=True) * ROUND
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80  # before rounding, which turns small negative numbers into 0
    y = tl.abs((y + step) - step)
    size = y.to(tl.int32, bitcast=True)
    normal = (size >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    subnormal = (y * (2.0 ** (-TINY))).to(tl.int32)
    code = tl.where(size >= ((128 - BIAS) << 23), normal, subnormal)
    return (code | sign).to(tl.uint8)


@triton.jit
def _code(x, factor, usable, KIND: tl.constexpr, LARGEST: tl.constexpr):
    # The codes of a row in a scaled format; zeros if the row has no usable scale.
    y = x * factor
    if KIND == "int8":
        y = (y + ROUND) - ROUND
    y = tl.where(usable, tl.minimum(tl.maximum(y, -LARGEST), LARGEST), 0.0)
    if KIND == "int8":
        codes = y.to(tl.int8)
    elif KIND == "e4m3":
        codes = _float8(y, 3, 7)
    else:
        codes = _float8(y, 2, 15)
    return codes


@triton.jit
def _encode_row(x1, x2, codes_at, scale_at, KIND: tl.constexpr, LARGEST: tl.constexpr, DIM: tl.constexpr):
    # Encodes one row of one head, given as two halves [BLOCK], into the cache.
    HALF: tl.constexpr = (DIM + 1) // 2
    cols = tl.arange(0, x1.shape[0])
    first, second = cols < HALF, cols < DIM - HALF
    if KIND == "float":
        if codes_at.dtype.element_ty == tl.bfloat16:
            x1, x2 = bfloat(x1), bfloat(x2)
        tl.store(codes_at + cols, x1.to(codes_at.dtype.element_ty), mask=first)
        tl.store(codes_at + HALF + cols, x2.to(codes_at.dtype.element_ty), mask=second)
    else:
        size = tl.maximum(tl.abs(x1), tl.abs(x2))  # ignores NaN, which is checked separately
        whole = (tl.abs(x1) < float("inf")) & (tl.abs(x2) < float("inf"))
        finite = tl.min(whole.to(tl.int32), axis=0) == 1
        a = tl.max(size, axis=0)
        usable = finite & (a >= SMALLEST)
        a = tl.where(usable, a, 1.0)
        factor = tl.div_rn(LARGEST, a)
        tl.store(codes_at + cols, _code(x1, factor, usable, KIND, LARGEST), mask=first)
        tl.store(codes_at + HALF + cols, _code(x2, factor, usable, KIND, LARGEST), mask=second)
        tl.store(scale_at, tl.where(usable, tl.div_rn(a, LARGEST), tl.where(finite, 0.0, float("nan"))))


@triton.jit
def _halves(at, DIM: tl.constexpr, BLOCK: tl.constexpr):
    # The two halves [BLOCK] of a row of DIM numbers, padded with zeros.
    HALF: tl.constexpr = (DIM + 1) // 2
    cols = tl.arange(0, BLOCK)
    return tl.load(at + cols, mask=cols < HALF, other=0.0), tl.load(at + HALF + cols, mask=cols < DIM - HALF, other=0.0)


@triton.jit
def _turned(at, angles, DIM: tl.constexpr, BLOCK: tl.constexpr):
    # The halves of a rotated row: x1 cos - x2 sin, x2 cos + x1 sin.
    x1, x2 = _halves(at, DIM, BLOCK)
    cos, sin = _halves(angles, DIM, BLOCK)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit(
    do_not_specialize=["q_stride", "k_stride", "v_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def rotate_store(
    q_ptr, k_ptr, v_ptr, q_stride, k_stride, v_stride, positions_ptr, table_ptr, slots_ptr,
    out_ptr, k_codes_ptr, v_codes_ptr, k_scale_ptr, v_scale_ptr, num_heads, kv_heads,
    KIND: tl.constexpr, LARGEST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # Program (t, h) for row t: the first num_heads heads rotate a query, the next kv_heads heads store a key (ROTATED:
    # a rotated one), the last kv_heads heads store a value. There may be no queries, or no keys and values.
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    HALF: tl.constexpr = DIM // 2
    angles = table_ptr
    if ROTATED:
        angles += tl.load(positions_ptr + t).to(tl.int64) * DIM
    slot = tl.load(slots_ptr + t)  # -1: the row belongs to no sequence and is not stored
    wait(EARLY)  # all reads so far are from the batch, which is complete when the pass begins
    first = slot.to(tl.int64) * kv_heads - num_heads
    if h < num_heads:
        y1, y2 = _turned(q_ptr + t * q_stride + h * DIM, angles, DIM, BLOCK)
        out = out_ptr + (t * num_heads + h) * DIM
        tl.store(out + cols, y1, mask=cols < HALF)
        tl.store(out + HALF + cols, y2, mask=cols < HALF)
    elif h < num_heads + kv_heads:
        k_at = k_ptr + t * k_stride + (h - num_heads) * DIM
        k1, k2 = _turned(k_at, angles, DIM, BLOCK) if ROTATED else _halves(k_at, DIM, BLOCK)
        place = first + h
        if slot >= 0:
            _encode_row(k1, k2, k_codes_ptr + place * DIM, k_scale_ptr + place, KIND, LARGEST, DIM)
    else:
        v1, v2 = _halves(v_ptr + t * v_stride + (h - num_heads - kv_heads) * DIM, DIM, BLOCK)
        place = first + h - kv_heads
        if slot >= 0:
            _encode_row(v1, v2, v_codes_ptr + place * DIM, v_scale_ptr + place, KIND, LARGEST, DIM)


@triton.jit(do_not_specialize_on_alignment=["index_ptr"])
def copy_rows(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, index_ptr, buffer_ptr, row_bytes, scale_bytes, num_slots,
    OUT: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr,
):  # fmt: skip
    # Copies cache row index[i] of layer program_id(2) to row i of the buffer (OUT), or back. A buffer row holds the
    # key, the value and their scales.
    i, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    slot = layer * num_slots + tl.load(index_ptr + i)
    i += layer * tl.num_programs(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < row_bytes
    row = buffer_ptr + i * (2 * (row_bytes + scale_bytes))
    keys, values = k_ptr + slot * row_bytes + cols, v_ptr + slot * row_bytes + cols
    if OUT:
        tl.store(row + cols, tl.load(keys, mask=inside), mask=inside)
        tl.store(row + row_bytes + cols, tl.load(values, mask=inside), mask=inside)
    else:
        tl.store(keys, tl.load(row + cols, mask=inside), mask=inside)
        tl.store(values, tl.load(row + row_bytes + cols, mask=inside), mask=inside)
    if SCALED and tl.program_id(1) == 0:
        at = tl.arange(0, SCALE_BLOCK)
        there = at < scale_bytes
        theirs, ours = row + 2 * row_bytes + at, slot * scale_bytes + at
        if OUT:
            tl.store(theirs, tl.load(k_scale_ptr + ours, mask=there), mask=there)
            tl.store(theirs + scale_bytes, tl.load(v_scale_ptr + ours, mask=there), mask=there)
        else:
            tl.store(k_scale_ptr + ours, tl.load(theirs, mask=there), mask=there)
            tl.store(v_scale_ptr + ours, tl.load(theirs + scale_bytes, mask=there), mask=there)
