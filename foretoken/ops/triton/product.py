"""Kernels of products: rows [T, K] times a stored weight [O, K] transposed.

The law of rows: a program multiplies tiles of 16 rows, padded; each tile is its own chain of `tl.dot` of one shape,
over steps of K in ascending order, cut into `SPLIT` parts that are added in ascending order. Of all this only the
number of tiles that a program holds (1, 2 or 4, so that they share one decoded tile of the weight) depends on the
number of rows, and no tile sees another.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE: tl.constexpr = tl.constexpr(16)  # rows of a product: the tensor cores' smallest


@triton.jit
def _e4m3(codes):
    """Bits s eeee mmm moved under float16's exponent, times 2^(15 - 7); exact, subnormals too. 0x7F is NaN."""
    bits = codes.to(tl.uint16)
    value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    value = (value.to(tl.float32) * 256.0).to(tl.float16)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def _decode(raw, zero, HALF_BYTE: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr):
    """A tile of codes as numbers of the rows' type; scales come later."""
    if WEIGHT == "int4":
        raw = ((raw >> (4 * HALF_BYTE)) & 15).to(tl.int8) - zero
    if WEIGHT == "e4m3" and ROWS == "fp8":
        values = raw.to(tl.float8e4nv, bitcast=True)
    elif WEIGHT == "e4m3":
        values = _e4m3(raw)
    elif WEIGHT == "e5m2":
        values = (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif WEIGHT == "dense" or ROWS == "int8":
        values = raw
    else:
        values = raw.to(tl.float16)
    return values


@triton.jit
def _add(
    acc,
    x_ptr,
    row_scale_ptr,
    first,
    cols,
    values,
    scales,
    group,
    num_rows,
    depth,
    num_groups,
    ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """One step of one tile of 16 rows."""
    t = first + tl.arange(0, TILE)
    at = t.to(tl.int64)[:, None] * depth + cols[None, :]
    x = tl.load(x_ptr + at, mask=(t < num_rows)[:, None] & (cols < depth)[None, :], other=0.0)
    KIND: tl.constexpr = tl.int32 if ROWS == "int8" else tl.float32
    if WIDEN:  # the interpreter knows no products of bfloat16
        x = x.to(tl.float32)
    if GROUPED:
        part = tl.dot(x, values, input_precision="ieee", out_dtype=KIND).to(tl.float32)
        if ROWS == "int8" or ROWS == "fp8" or ROWS == "fp8_half":
            row_scales = tl.load(row_scale_ptr + t.to(tl.int64) * num_groups + group, mask=t < num_rows, other=0.0)
            acc = tl.fma(part, scales[None, :] * row_scales[:, None], acc)
        else:
            acc = tl.fma(part, tl.broadcast_to(scales[None, :], (TILE, BLOCK_O)), acc)
    else:
        acc = tl.dot(x, values, acc, input_precision="ieee", out_dtype=KIND)
    return acc


@triton.jit
def _finish(
    acc,
    out_ptr,
    row_scale_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    first,
    outputs_at,
    scale_at,
    num_rows,
    outputs,
    part,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """A tile's sums scaled, with bias and residual (where no other part is to be added first), stored."""
    t = (first + tl.arange(0, TILE)).to(tl.int64)
    inside = (t < num_rows)[:, None] & (outputs_at < outputs)[None, :]
    y = acc.to(tl.float32)
    if ROWS == "half":
        if not GROUPED and WEIGHT != "dense":
            y = y * tl.load(scale_ptr + scale_at, mask=outputs_at < outputs, other=0.0).to(tl.float32)[None, :]
        y = y * tl.load(row_scale_ptr + t, mask=t < num_rows, other=0.0)[:, None]
    elif not GROUPED and WEIGHT != "dense":
        scales = tl.load(scale_ptr + scale_at, mask=outputs_at < outputs, other=0.0).to(tl.float32)
        y = y * (scales[None, :] * tl.load(row_scale_ptr + t, mask=t < num_rows, other=0.0)[:, None])
    at = t[:, None] * outputs + outputs_at[None, :]
    if SPLIT == 1:
        if BIAS:
            y = y + tl.load(bias_ptr + outputs_at, mask=outputs_at < outputs, other=0.0)[None, :]
        if RESIDUAL:
            y = tl.load(residual_ptr + at, mask=inside, other=0.0) + y
        tl.store(out_ptr + at, y, mask=inside)
    else:
        tl.store(out_ptr + part.to(tl.int64) * num_rows * outputs + at, y, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x_ptr,
    row_scale_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    depth,
    row_bytes,
    outputs,
    num_groups,
    num_steps,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLIT: tl.constexpr,
    TILES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (m, o, s): TILES * 16 rows, BLOCK_O outputs, part s of the steps."""
    first = tl.program_id(0) * (TILES * TILE)
    outputs_at = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    part = tl.program_id(2)
    known = outputs_at < outputs
    HALVES: tl.constexpr = 2 if WEIGHT == "int4" else 1
    KIND: tl.constexpr = tl.int32 if ROWS == "int8" and not GROUPED else tl.float32
    scale_at = (outputs_at // 32) * (num_groups * 32) + outputs_at % 32  # packing.by_block
    columns = tl.arange(0, UNIT)
    weights = w_ptr + outputs_at.to(tl.int64)[None, :] * row_bytes + columns[:, None]  # [UNIT, BLOCK_O]
    acc0 = tl.zeros((TILE, BLOCK_O), KIND)
    acc1, acc2, acc3 = acc0, acc0, acc0
    per_part = tl.cdiv(num_steps, SPLIT)
    for step in range(part * per_part, tl.minimum((part + 1) * per_part, num_steps)):
        here = (step * UNIT + columns < row_bytes)[:, None] & known[None, :]
        raw = tl.load(weights + step * UNIT, mask=here, other=0)
        for half in tl.static_range(HALVES):
            group = step * HALVES + half
            cols = group * UNIT + columns
            scales, zero = None, tl.full((1, BLOCK_O), 8, tl.int8)
            # A last byte's upper half may be no group at all: its rows read as zeros, its scale must be a number.
            there = known & (tl.zeros_like(outputs_at) + group < num_groups)
            if GROUPED:
                scales = tl.load(scale_ptr + scale_at + group * 32, mask=there, other=0.0).to(tl.float32)
            if ZEROS:
                at = group * 32 if GROUPED else 0
                zero = tl.load(zero_ptr + scale_at + at, mask=there if GROUPED else known, other=0).to(tl.int8)
                zero = zero[None, :]
            values = _decode(raw, zero, half, WEIGHT, ROWS)
            if WIDEN:
                values = values.to(tl.float32)
            acc0 = _add(acc0, x_ptr, row_scale_ptr, first, cols, values, scales, group, num_rows, depth, num_groups,
                        ROWS, GROUPED, WIDEN, BLOCK_O)  # fmt: skip
            if TILES > 1:
                acc1 = _add(acc1, x_ptr, row_scale_ptr, first + TILE, cols, values, scales, group, num_rows, depth,
                            num_groups, ROWS, GROUPED, WIDEN, BLOCK_O)  # fmt: skip
            if TILES > 2:
                acc2 = _add(acc2, x_ptr, row_scale_ptr, first + 2 * TILE, cols, values, scales, group, num_rows, depth,
                            num_groups, ROWS, GROUPED, WIDEN, BLOCK_O)  # fmt: skip
                acc3 = _add(acc3, x_ptr, row_scale_ptr, first + 3 * TILE, cols, values, scales, group, num_rows, depth,
                            num_groups, ROWS, GROUPED, WIDEN, BLOCK_O)  # fmt: skip
    for tile in tl.static_range(TILES):
        acc = acc0
        if tile == 1:
            acc = acc1
        if tile == 2:
            acc = acc2
        if tile == 3:
            acc = acc3
        _finish(acc, out_ptr, row_scale_ptr, scale_ptr, bias_ptr, residual_ptr, first + tile * TILE, outputs_at,
                scale_at, num_rows, outputs, part, WEIGHT, ROWS, GROUPED, SPLIT, BIAS, RESIDUAL)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def combine(
    parts_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    outputs,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts of a row's sums, added in ascending order; then bias and residual."""
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < outputs
    at = t * outputs + o
    y = tl.load(parts_ptr + at, mask=inside, other=0.0)
    for part in tl.static_range(1, SPLIT):
        y = y + tl.load(parts_ptr + part * num_rows.to(tl.int64) * outputs + at, mask=inside, other=0.0)
    if BIAS:
        y = y + tl.load(bias_ptr + o, mask=inside, other=0.0)
    if RESIDUAL:
        y = tl.load(residual_ptr + at, mask=inside, other=0.0) + y
    tl.store(out_ptr + at, y, mask=inside)
