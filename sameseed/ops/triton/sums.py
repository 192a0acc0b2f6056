"""The inner loop of a product: sums over a share of the steps of K, for tiles of rows and a block of outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from sameseed.ops.triton import decode


@triton.jit
def _numbers(words, low, zeros, WEIGHT: tl.constexpr, SPAN: tl.constexpr, MACHINE: tl.constexpr, FLOAT8: tl.constexpr):
    """Decode a tile of words to a tuple of tiles of numbers, one per part. zeros: per group of SPAN parts, or None."""
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
    """Load [BLOCK_O] for each of COUNT groups. Beyond the last group, repeat it: x is zero there, so any will do."""
    out = ()
    for i in tl.static_range(COUNT):
        at = ptr + tl.minimum(first + i, last) * 32
        out = out + (tl.load(at) if EVEN else tl.load(at, mask=inside, other=0),)
    return out


@triton.jit
def _dot(x, numbers, more, acc, ROWS: tl.constexpr, WIDEN: tl.constexpr, LEFT: tl.constexpr):
    """Add x times a tile of numbers to `acc`, transposed if LEFT. more: second terms of the numbers, or None."""
    KIND: tl.constexpr = tl.int32 if ROWS == "int8" else tl.float32
    if WIDEN:  # the interpreter has no products of bfloat16
        x, numbers = x.to(tl.float32), numbers.to(tl.float32)
    if LEFT:
        x = tl.trans(x)
        acc = tl.dot(tl.trans(numbers), x, acc, input_precision="ieee", out_dtype=KIND)
        if more is not None:
            acc = tl.dot(tl.trans(more), x, acc, input_precision="ieee", out_dtype=KIND)
    else:
        acc = tl.dot(x, numbers, acc, input_precision="ieee", out_dtype=KIND)
        if more is not None:
            acc = tl.dot(x, more, acc, input_precision="ieee", out_dtype=KIND)
    return acc


@triton.jit
def _scaled(sums, acc, scales, row_scale_at, inside, ROWS: tl.constexpr, LEFT: tl.constexpr):
    """Add a group's sums times its scales to `acc`."""
    scales = scales.to(tl.float32)
    scales = tl.broadcast_to(scales[:, None] if LEFT else scales[None, :], sums.shape)
    if ROWS == "int8" or ROWS == "fp8":
        row_scales = tl.load(row_scale_at, mask=inside, other=0.0)
        scales = scales * (row_scales[None, :] if LEFT else row_scales[:, None])
    return tl.fma(sums.to(tl.float32), scales, acc)


@triton.jit
def share_of(
    x_ptr, row_scale_ptr, w_ptr, low_ptr, scale_ptr, zero_ptr, first, base, known, of_group, share, num_rows, depth,
    num_groups, num_steps,
    WEIGHT: tl.constexpr, ROWS: tl.constexpr, GROUPED: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    SPAN: tl.constexpr, EVEN_K: tl.constexpr, EVEN_O: tl.constexpr, BLOCK_O: tl.constexpr, SPLIT: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, LEFT: tl.constexpr, MACHINE: tl.constexpr, FLOAT8: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Sums over share `share` of the steps for TILES tiles of TILE rows from row `first` on: [TILE, BLOCK_O] each."""
    GROUPS: tl.constexpr = PARTS // SPAN if GROUPED else 1  # groups per step
    SUMS: tl.constexpr = tl.int32 if ROWS == "int8" else tl.float32
    DENSE: tl.constexpr = WEIGHT == "dense"
    NEXT: tl.constexpr = WIDTH if DENSE else 32 * WIDTH  # words from one step of an output to the next
    SHAPE: tl.constexpr = (BLOCK_O, TILE) if LEFT else (TILE, BLOCK_O)
    per_share = tl.cdiv(num_steps, SPLIT)
    start = share * per_share
    last = num_groups - 1
    o, i, t = tl.arange(0, BLOCK_O), tl.arange(0, WIDTH), tl.arange(0, TILE)
    # Offsets that may exceed 2^31 are in the 64-bit base of a program; the rest of an address fits in 32 bits.
    if DENSE:
        at = base * depth + ((o * depth)[None, :] + i[:, None] + start * NEXT)  # [WIDTH, BLOCK_O]
    else:
        at = ((o // 32) * (num_steps * NEXT) + (o % 32) * WIDTH)[None, :] + i[:, None] + start * NEXT
        at = base * (num_steps * WIDTH) + at
    words_at = w_ptr + at
    low_at = low_ptr + at if WEIGHT == "both" else words_at
    row = first.to(tl.int64)
    x_at, row_scale_at, inside, accs = (), (), (), ()
    for tile in tl.static_range(TILES):
        of_tile = x_ptr + (row + tile * TILE) * depth
        x_at = x_at + (of_tile + ((t * depth)[:, None] + i[None, :] + start * (PARTS * WIDTH)),)
        inside = inside + (first + tile * TILE + t < num_rows,)
        accs = accs + (tl.zeros(SHAPE, tl.float32 if GROUPED else SUMS),)
        if GROUPED and (ROWS == "int8" or ROWS == "fp8"):
            row_scale_at = row_scale_at + (row_scale_ptr + (row + tile * TILE) * num_groups + t * num_groups,)
        else:
            row_scale_at = row_scale_at + (t,)
    # Scales are loaded one step ahead, because no asynchronous copy prefetches them.
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
        zeros = None  # loaded in this step: if carried over, they would force words out of the layout of products
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
                    acc = tl.zeros(SHAPE, SUMS)
                next_sums = next_sums + (_dot(x, numbers[part], more, acc, ROWS, WIDEN, LEFT),)
            sums = next_sums
            if GROUPED and part % SPAN == SPAN - 1:
                group = tl.minimum(step * GROUPS + part // SPAN, last)
                next_accs = ()
                for tile in tl.static_range(TILES):
                    acc = _scaled(sums[tile], accs[tile], scales[part // SPAN], row_scale_at[tile] + group,
                                  inside[tile], ROWS, LEFT)  # fmt: skip
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
    return accs
