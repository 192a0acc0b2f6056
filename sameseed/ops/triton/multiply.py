"""Kernels of products: rows [T, K] times a stored weight [O, K] transposed.

Why products are row-invariant: a program multiplies tiles of 16 rows, padded if necessary. Each tile has its own chain
of `tl.dot` calls of one shape, over the steps of K in one order. The steps are cut into `SPLIT` shares, which are added
in ascending order. Only the number of tiles per program (1, 2 or 4, which share the decoded weights) depends on the
number of rows, and tiles do not affect each other. Larger tiles (`tiling.py`) are used only on devices where they were
tested to give the same bits.

A step takes `WIDTH` words of each output. A word has `PARTS` codes: part p of word i is column
(step * PARTS + p) * WIDTH + i. So each part of a tile of words is a tile of numbers, without any shuffling.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sameseed.ops.triton.common import wait
from sameseed.ops.triton.rows import make_ready
from sameseed.ops.triton.sums import share_of


@triton.jit
def _whole(
    acc, row_scale_ptr, scale_ptr, t, outputs_at, scale_at, num_rows, outputs,
    WEIGHT: tl.constexpr, ROWS: tl.constexpr, GROUPED: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """A tile's sums times the scales of whole rows, if there are any: float32 [TILE, BLOCK_O]."""
    y = acc.to(tl.float32)
    if LEFT:
        y = tl.trans(y)
    if ROWS == "half":
        if not GROUPED and WEIGHT != "dense":
            y = y * tl.load(scale_ptr + scale_at, mask=outputs_at < outputs, other=0.0).to(tl.float32)[None, :]
        y = y * tl.load(row_scale_ptr + t, mask=t < num_rows, other=0.0)[:, None]
    elif not GROUPED and WEIGHT != "dense":
        scales = tl.load(scale_ptr + scale_at, mask=outputs_at < outputs, other=0.0).to(tl.float32)
        y = y * (scales[None, :] * tl.load(row_scale_ptr + t, mask=t < num_rows, other=0.0)[:, None])
    return y


@triton.jit
def _with_extras(
    y, bias_ptr, residual_ptr, at, outputs_at, outputs, inside, BIAS: tl.constexpr, RESIDUAL: tl.constexpr
):
    """Add bias, then residual, to sums [.., BLOCK]."""
    if BIAS:
        bias = tl.load(bias_ptr + outputs_at, mask=outputs_at < outputs, other=0.0)
        y = y + (bias[None, :] if len(y.shape) == 2 else bias)
    if RESIDUAL:
        y = tl.load(residual_ptr + at, mask=inside, other=0.0) + y
    return y


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x_ptr, row_scale_ptr, w_ptr, low_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, depth,
    outputs, num_groups, num_steps,
    WEIGHT: tl.constexpr, ROWS: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, EVEN_K: tl.constexpr, EVEN_O: tl.constexpr,
    BLOCK_O: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
    LEFT: tl.constexpr, MACHINE: tl.constexpr, FLOAT8: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (m, o, s): TILES * TILE rows, BLOCK_O outputs, share s of the steps. A group is SPAN parts of a step.

    WHOLE: the program computes all shares and adds them in ascending order; otherwise `combine` adds them.
    """
    first, share = tl.program_id(0) * (TILES * TILE), tl.program_id(2)
    o = tl.arange(0, BLOCK_O)
    base = (tl.program_id(1) * BLOCK_O).to(tl.int64)
    outputs_at = tl.program_id(1) * BLOCK_O + o
    known = outputs_at < outputs
    wait(EARLY)
    of_group = base * num_groups + ((o // 32) * (num_groups * 32) + o % 32)  # _packed.by_block
    if WHOLE and SPLIT > 1:
        t = (first + tl.arange(0, TILE)).to(tl.int64)
        total = tl.zeros((TILE, BLOCK_O), tl.float32)
        for each in range(SPLIT):
            accs = share_of(x_ptr, row_scale_ptr, w_ptr, low_ptr, scale_ptr, zero_ptr, first, base, known,
                         of_group, each, num_rows, depth, num_groups, num_steps, WEIGHT, ROWS, GROUPED, WIDTH, PARTS,
                         SPAN, EVEN_K, EVEN_O, BLOCK_O, SPLIT, TILE, 1, LEFT, MACHINE, FLOAT8, WIDEN)  # fmt: skip
            y = _whole(accs[0], row_scale_ptr, scale_ptr, t, outputs_at, of_group, num_rows, outputs, WEIGHT, ROWS,
                       GROUPED, LEFT)  # fmt: skip
            total = tl.where(each == 0, y, total + y)  # 0.0 + -0.0 would be 0.0
        at = t[:, None] * outputs + outputs_at[None, :]
        inside = (t < num_rows)[:, None] & (outputs_at < outputs)[None, :]
        total = _with_extras(total, bias_ptr, residual_ptr, at, outputs_at, outputs, inside, BIAS, RESIDUAL)
        tl.store(out_ptr + at, total, mask=inside)
    else:
        accs = share_of(x_ptr, row_scale_ptr, w_ptr, low_ptr, scale_ptr, zero_ptr, first, base, known,
                     of_group, share, num_rows, depth, num_groups, num_steps, WEIGHT, ROWS, GROUPED, WIDTH, PARTS,
                     SPAN, EVEN_K, EVEN_O, BLOCK_O, SPLIT, TILE, TILES, LEFT, MACHINE, FLOAT8, WIDEN)  # fmt: skip
        for tile in tl.static_range(TILES):
            t = (first + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
            y = _whole(accs[tile], row_scale_ptr, scale_ptr, t, outputs_at, of_group, num_rows, outputs, WEIGHT, ROWS,
                       GROUPED, LEFT)  # fmt: skip
            at = t[:, None] * outputs + outputs_at[None, :]
            inside = (t < num_rows)[:, None] & (outputs_at < outputs)[None, :]
            if SPLIT == 1:
                y = _with_extras(y, bias_ptr, residual_ptr, at, outputs_at, outputs, inside, BIAS, RESIDUAL)
                tl.store(out_ptr + at, y, mask=inside)
            else:
                tl.store(out_ptr + share.to(tl.int64) * num_rows * outputs + at, y, mask=inside)


@triton.jit
def add_shares(
    parts_ptr, bias_ptr, residual_ptr, out_ptr, t, o, num_rows, outputs,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Add the shares of a row's outputs `o` in ascending order; then bias and residual."""
    inside = o < outputs
    at = t * outputs + o
    y = tl.load(parts_ptr + at, mask=inside, other=0.0)
    for part in tl.static_range(1, SPLIT):
        y = y + tl.load(parts_ptr + part * num_rows.to(tl.int64) * outputs + at, mask=inside, other=0.0)
    y = _with_extras(y, bias_ptr, residual_ptr, at, o, outputs, inside, BIAS, RESIDUAL)
    tl.store(out_ptr + at, y, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def combine(
    parts_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, outputs,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the shares of a row in ascending order; then bias and residual."""
    wait(EARLY)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    add_shares(parts_ptr, bias_ptr, residual_ptr, out_ptr, tl.program_id(0).to(tl.int64), o, num_rows, outputs, BIAS,
               RESIDUAL, SPLIT)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def combine_norm(
    parts_ptr, bias_ptr, residual_ptr, out_ptr, norm_ptr, values_ptr, scale_ptr, num_rows, outputs, eps, num_groups,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`combine` for a whole row, then `rows.prepare` with norm. It reads the row again, for the bits of `prepare`."""
    wait(EARLY)
    t = tl.program_id(0).to(tl.int64)
    add_shares(parts_ptr, bias_ptr, residual_ptr, out_ptr, t, tl.arange(0, BLOCK), num_rows, outputs, BIAS, RESIDUAL,
               SPLIT)  # fmt: skip
    tl.debug_barrier()  # waits until all threads have written their sums
    make_ready(out_ptr, norm_ptr, values_ptr, scale_ptr, t, t, outputs, eps, num_groups, "norm", FORM, GROUP, BLOCK)
