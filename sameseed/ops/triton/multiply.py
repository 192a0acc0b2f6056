"""Kernels of products: rows [T, K] times a stored weight [O, K] transposed.

The law of rows: a program multiplies tiles of 16 rows, padded; each tile is its own chain of `tl.dot` of one shape,
over steps of K in one order, cut into `SPLIT` shares that are added in ascending order. Of all this only the number of
tiles that a program holds (1, 2 or 4, so that they share the weight's decoded numbers) depends on the number of rows,
and no tile sees another.

A step takes `WIDTH` words of each output. A word has `PARTS` codes: part p of word i is column
(step * PARTS + p) * WIDTH + i, so that each part of a tile of words is a tile of numbers, without any shuffling.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sameseed.ops.triton import decode

TILE: tl.constexpr = tl.constexpr(16)  # rows of a product: the tensor cores' smallest


@triton.jit
def _numbers(words, low, zeros, WEIGHT: tl.constexpr, SPAN: tl.constexpr, MACHINE: tl.constexpr, FLOAT8: tl.constexpr):
    """A tile of words as a tuple of tiles of numbers, one a part. zeros: by group, of SPAN parts each, or None."""
    if WEIGHT == "int4":
        if zeros is not None:
            zeros = (zeros[0], zeros[1 // SPAN], zeros[2 // SPAN], zeros[3 // SPAN])
        out = decode.int4(words, zeros, MACHINE)
    elif WEIGHT == "int4_bytes":
        if zeros is not None:
            zeros = (zeros[0], zeros[1 // SPAN])
        out = decode.int4_bytes(words, zeros, MACHINE)
    elif WEIGHT == "int8":
        out = decode.int8(words, MACHINE)
    elif WEIGHT == "e4m3":
        out = decode.e4m3(words, MACHINE, FLOAT8)
    elif WEIGHT == "e5m2":
        out = decode.e5m2(words, MACHINE)
    elif WEIGHT == "e2m1":
        out = decode.e2m1(words, MACHINE)
    elif WEIGHT == "nf4":
        out = decode.nf4(words, MACHINE)
    elif WEIGHT == "upper":
        out = decode.upper(words, MACHINE)
    elif WEIGHT == "both":
        out = decode.both(words, low, MACHINE)
    elif WEIGHT == "int8_bytes":
        out = (words.to(tl.int8, bitcast=True),)
    else:
        out = (words,)
    return out


@triton.jit
def _by_group(ptr, first, last, inside, COUNT: tl.constexpr, EVEN: tl.constexpr):
    """[BLOCK_O] of each of COUNT groups; beyond the last group its own once more: any number does for rows of zeros."""
    out = ()
    for i in tl.static_range(COUNT):
        at = ptr + tl.minimum(first + i, last) * 32
        out = out + (tl.load(at) if EVEN else tl.load(at, mask=inside, other=0),)
    return out


@triton.jit
def _dot(x, numbers, more, acc, ROWS: tl.constexpr, WIDEN: tl.constexpr):
    """x times a tile of numbers, added to `acc`. more: their second terms, or None."""
    KIND: tl.constexpr = tl.int32 if ROWS == "int8" else tl.float32
    if WIDEN:  # the interpreter knows no products of bfloat16
        x, numbers = x.to(tl.float32), numbers.to(tl.float32)
    acc = tl.dot(x, numbers, acc, input_precision="ieee", out_dtype=KIND)
    if more is not None:
        acc = tl.dot(x, more, acc, input_precision="ieee", out_dtype=KIND)
    return acc


@triton.jit
def _scaled(sums, acc, scales, row_scale_at, inside, ROWS: tl.constexpr, BLOCK_O: tl.constexpr):
    """A group's sums under its scales, added to `acc`."""
    scales = tl.broadcast_to(scales.to(tl.float32)[None, :], (TILE, BLOCK_O))
    if ROWS == "int8" or ROWS == "fp8":
        scales = scales * tl.load(row_scale_at, mask=inside, other=0.0)[:, None]
    return tl.fma(sums.to(tl.float32), scales, acc)


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
    low_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    depth,
    outputs,
    num_groups,
    num_steps,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_O: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLIT: tl.constexpr,
    TILES: tl.constexpr,
    MACHINE: tl.constexpr,
    FLOAT8: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (m, o, s): TILES * 16 rows, BLOCK_O outputs, share s of the steps. A group is SPAN parts of a step."""
    GROUPS: tl.constexpr = PARTS // SPAN if GROUPED else 1  # of a step
    SUMS: tl.constexpr = tl.int32 if ROWS == "int8" else tl.float32
    DENSE: tl.constexpr = WEIGHT == "dense"
    NEXT: tl.constexpr = WIDTH if DENSE else 32 * WIDTH  # words from one step of an output to the next
    first, share = tl.program_id(0) * (TILES * TILE), tl.program_id(2)
    per_share = tl.cdiv(num_steps, SPLIT)
    start = share * per_share
    last = num_groups - 1
    o, i, t = tl.arange(0, BLOCK_O), tl.arange(0, WIDTH), tl.arange(0, TILE)
    # What may pass 2^31 lies in a program's own base: the rest of an address fits 32 bits.
    base = (tl.program_id(1) * BLOCK_O).to(tl.int64)
    known = tl.program_id(1) * BLOCK_O + o < outputs
    if DENSE:
        at = base * depth + ((o * depth)[None, :] + i[:, None] + start * NEXT)  # [WIDTH, BLOCK_O]
    else:
        at = ((o // 32) * (num_steps * NEXT) + (o % 32) * WIDTH)[None, :] + i[:, None] + start * NEXT
        at = base * (num_steps * WIDTH) + at
    words_at = w_ptr + at
    low_at = low_ptr + at if WEIGHT == "both" else words_at
    of_group = base * num_groups + ((o // 32) * (num_groups * 32) + o % 32)  # packing.by_block
    row = first.to(tl.int64)
    x_at, row_scale_at, inside, accs = (), (), (), ()
    for tile in tl.static_range(TILES):
        of_tile = x_ptr + (row + tile * TILE) * depth
        x_at = x_at + (of_tile + ((t * depth)[:, None] + i[None, :] + start * (PARTS * WIDTH)),)
        inside = inside + (first + tile * TILE + t < num_rows,)
        accs = accs + (tl.zeros((TILE, BLOCK_O), tl.float32 if GROUPED else SUMS),)
        if GROUPED and (ROWS == "int8" or ROWS == "fp8"):
            row_scale_at = row_scale_at + (row_scale_ptr + (row + tile * TILE) * num_groups + t * num_groups,)
        else:
            row_scale_at = row_scale_at + (t,)
    # A step's scales are asked for one step before: no asynchronous copy fetches them ahead.
    scales = (o,)
    if GROUPED:
        scales = _by_group(scale_ptr + of_group, start * GROUPS, last, known, GROUPS, EVEN_O)
    for step in range(start, tl.minimum(start + per_share, num_steps)):
        if EVEN_O and (EVEN_K or not DENSE):
            words = tl.load(words_at)
        elif DENSE and not EVEN_K:
            words = tl.load(words_at, mask=known[None, :] & (step * WIDTH + i < depth)[:, None], other=0)
        else:
            words = tl.load(words_at, mask=known[None, :], other=0)
        if not DENSE and ROWS != "int8" and not MACHINE:
            words = words.to(tl.uint16, bitcast=True)
        low = words
        if WEIGHT == "both":
            low = tl.load(low_at) if EVEN_O else tl.load(low_at, mask=known[None, :], other=0)
        next_scales = scales
        if GROUPED:
            next_scales = _by_group(scale_ptr + of_group, (step + 1) * GROUPS, last, known, GROUPS, EVEN_O)
        zeros = None  # loaded here: carried from step to step they would keep words from lying as products want
        if zero_ptr is not None:
            zeros = _by_group(zero_ptr + of_group, step * GROUPS if GROUPED else 0, last, known, GROUPS, EVEN_O)
        numbers = _numbers(words, low, zeros, WEIGHT, SPAN if GROUPED else PARTS, MACHINE, FLOAT8)
        sums = accs
        for part in tl.static_range(PARTS):
            more = None
            if WEIGHT == "nf4":
                more = numbers[PARTS + part]
            next_sums = ()
            for tile in tl.static_range(TILES):
                here = inside[tile][:, None]
                if not EVEN_K:
                    here = here & ((step * PARTS + part) * WIDTH + i < depth)[None, :]
                x = tl.load(x_at[tile] + part * WIDTH, mask=here, other=0.0)
                acc = sums[tile]
                if GROUPED and part % SPAN == 0:
                    acc = tl.zeros((TILE, BLOCK_O), SUMS)
                next_sums = next_sums + (_dot(x, numbers[part], more, acc, ROWS, WIDEN),)
            sums = next_sums
            if GROUPED and part % SPAN == SPAN - 1:
                group = tl.minimum(step * GROUPS + part // SPAN, last)
                next_accs = ()
                for tile in tl.static_range(TILES):
                    acc = _scaled(sums[tile], accs[tile], scales[part // SPAN], row_scale_at[tile] + group,
                                  inside[tile], ROWS, BLOCK_O)  # fmt: skip
                    next_accs = next_accs + (acc,)
                accs = next_accs
        if not GROUPED:
            accs = sums
        scales = next_scales
        words_at += NEXT
        low_at += NEXT
        moved = ()
        for tile in tl.static_range(TILES):
            moved = moved + (x_at[tile] + PARTS * WIDTH,)
        x_at = moved
    outputs_at = tl.program_id(1) * BLOCK_O + o
    for tile in tl.static_range(TILES):
        _finish(accs[tile], out_ptr, row_scale_ptr, scale_ptr, bias_ptr, residual_ptr, first + tile * TILE, outputs_at,
                of_group, num_rows, outputs, share, WEIGHT, ROWS, GROUPED, SPLIT, BIAS, RESIDUAL)  # fmt: skip


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
