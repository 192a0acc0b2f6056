"""Kernels of single rows: norm, SwiGLU, and preparation for a product. One program computes one row.

A program reads one row and nothing else, and its shape depends only on the row's width. So other rows cannot change its
bits. Every float operation is explicit: launches forbid the compiler to fuse a product and a sum.
"""

# Kernels are written in Triton's language, so they have no type annotations.
from __future__ import annotations

import triton
import triton.language as tl

from sameseed.ops.triton.common import ROUND, SMALLEST, bfloat, inverse, power_of, wait


@triton.jit
def _gated(base, cols, width, SOURCE: tl.constexpr):
    """SwiGLU, or its form with gelu, of a row of 2 * width numbers, at columns `cols`."""
    gate = tl.load(base + cols, mask=cols < width, other=0.0)
    up = tl.load(base + width + cols, mask=cols < width, other=0.0)
    inner = gate
    if SOURCE == "gelu":  # gelu(x) in its tanh form is x * sigmoid(2 u), with u = sqrt(2 / pi) * (x + 0.044715 x^3)
        inner = gate * (1.5957691216 + gate * gate * 0.07135481627)
    return tl.div_rn(gate, 1.0 + tl.exp(-inner)) * up


@triton.jit
def _source(x_ptr, norm_ptr, row, width, eps, SOURCE: tl.constexpr, BLOCK: tl.constexpr):
    """The row [BLOCK] as float32: unchanged, normed, or gated; zeros beyond its width."""
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    if SOURCE == "silu" or SOURCE == "gelu":
        x = _gated(x_ptr + row * (2 * width), cols, width, SOURCE)
    else:
        x = tl.load(x_ptr + row * width + cols, mask=inside, other=0.0)
        if SOURCE == "norm":
            # Read the row again in a fixed shape. The layout of x depends on the type that is stored at the end, and so
            # would the order of a sum over x. With the fixed shape, all forms of a row have the same mean.
            places = tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # [BLOCK / 4, 4]
            y = tl.load(x_ptr + row * width + places, mask=places < width, other=0.0)
            mean = tl.div_rn(tl.sum(tl.sum(y * y, axis=1), axis=0), tl.full((), width, tl.float32))
            x = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
            x = x * tl.load(norm_ptr + cols, mask=inside, other=0.0)
    return x


@triton.jit
def _extent(groups):
    """For each of groups [GROUPS, GROUP]: whether all numbers are finite (1 or 0), and the largest magnitude."""
    return tl.min((tl.abs(groups) < float("inf")).to(tl.int32), axis=1), tl.max(tl.abs(groups), axis=1)


@triton.jit
def _quantized(groups, finite, a, FORM: tl.constexpr, GROUPS: tl.constexpr):
    """Quantize groups of a row [GROUPS, GROUP]: the values of int8 or e4m3 codes, and scales [GROUPS]."""
    END: tl.constexpr = 127.0 if FORM == "int8" else 448.0
    finite = finite == 1
    usable = finite & (a >= SMALLEST)
    a = tl.where(usable, a, 1.0)
    values = groups * tl.div_rn(tl.full((GROUPS,), END, tl.float32), a)[:, None]
    if FORM == "int8":
        values = (values + ROUND) - ROUND
    else:
        values = tl.minimum(tl.maximum(values, -END), END)
        # The spacing of e4m3 at a value: 2^-3 of its power of two, at least 2^-9.
        step = tl.maximum((values.to(tl.int32, bitcast=True) & 0x7F800000) - (3 << 23), (127 - 9) << 23)
        step = step.to(tl.float32, bitcast=True) * ROUND
        values = (values + step) - step
    values = tl.minimum(tl.maximum(values, -END), END)
    scales = tl.div_rn(a, tl.full((GROUPS,), END, tl.float32))
    scales = tl.where(usable, scales, tl.where(finite, 0.0, float("nan")))
    return tl.where(usable[:, None], values, 0.0), scales


@triton.jit
def _stored(
    x, finite, a, out_ptr, scale_ptr, t, first, width, num_groups,
    FORM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store columns from `first` on, x [BLOCK], in the form.

    finite, a: whether groups are finite, and their largest magnitudes; for "half", a is that of the whole row.
    """
    cols = first + tl.arange(0, BLOCK)
    at = out_ptr + t * width + cols
    if FORM == "single":
        tl.store(at, x, mask=cols < width)
    elif FORM == "bf16":
        tl.store(at, bfloat(x).to(tl.bfloat16), mask=cols < width)
    elif FORM == "half":
        # Divided by the largest power of two <= its largest magnitude: keeps 11 bits of float16, and no row overflows.
        power = power_of(a)
        tl.store(at, (x * inverse(power)).to(tl.float16), mask=cols < width)
        tl.store(scale_ptr + t, power.to(tl.float32, bitcast=True))
    else:
        GROUPS: tl.constexpr = BLOCK // GROUP if BLOCK > GROUP else 1
        values, scales = _quantized(tl.reshape(x, (GROUPS, BLOCK // GROUPS)), finite, a, FORM, GROUPS)
        flat = tl.reshape(values, (BLOCK,))
        tl.store(at, flat.to(out_ptr.dtype.element_ty), mask=cols < width)
        g = first // GROUP + tl.arange(0, GROUPS)
        tl.store(scale_ptr + t * num_groups + g, scales, mask=g < num_groups)


@triton.jit
def _in_chunks(
    x_ptr, out_ptr, scale_ptr, t, width, num_groups,
    SOURCE: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A gated row too wide for registers: computed once for values that need the whole row, then again to store."""
    base, cols = x_ptr + t * (2 * width), tl.arange(0, CHUNK)
    QUANTIZED: tl.constexpr = FORM == "int8" or FORM == "fp8"
    BY_ROW: tl.constexpr = QUANTIZED and GROUP == BLOCK
    GROUPS: tl.constexpr = CHUNK // GROUP if QUANTIZED and not BY_ROW else 1
    finite, a = tl.full((1,), 1, tl.int32), tl.zeros((1,), tl.float32)
    if FORM == "half" or BY_ROW:
        for first in range(0, BLOCK, CHUNK):
            some, size = _extent(tl.reshape(_gated(base, first + cols, width, SOURCE), (1, CHUNK)))
            finite, a = tl.minimum(finite, some), tl.maximum(a, size)
    for first in range(0, BLOCK, CHUNK):
        x = _gated(base, first + cols, width, SOURCE)
        if FORM == "half":
            _stored(x, finite, tl.max(a, axis=0), out_ptr, scale_ptr, t, first, width, num_groups, FORM, GROUP, CHUNK)
        elif QUANTIZED and not BY_ROW:
            some, size = _extent(tl.reshape(x, (GROUPS, GROUP)))
            _stored(x, some, size, out_ptr, scale_ptr, t, first, width, num_groups, FORM, GROUP, CHUNK)
        else:
            _stored(x, finite, a, out_ptr, scale_ptr, t, first, width, num_groups, FORM, GROUP, CHUNK)


@triton.jit
def make_ready(
    x_ptr, norm_ptr, out_ptr, scale_ptr, t, row, width, eps, num_groups,
    SOURCE: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Prepare row `row` of x, by `SOURCE`, as row t of a product in the form."""
    x = _source(x_ptr, norm_ptr, row, width, eps, SOURCE, BLOCK)
    finite, a = 1, 0.0
    if FORM == "half":
        a = tl.max(tl.abs(x), axis=0)
    elif FORM == "int8" or FORM == "fp8":
        finite, a = _extent(tl.reshape(x, (BLOCK // GROUP, GROUP)))
    _stored(x, finite, a, out_ptr, scale_ptr, t, 0, width, num_groups, FORM, GROUP, BLOCK)


@triton.jit(do_not_specialize_on_alignment=["index_ptr"])
def prepare(
    x_ptr, index_ptr, norm_ptr, out_ptr, scale_ptr, width, eps, num_groups,
    SOURCE: tl.constexpr, FORM: tl.constexpr, GATHER: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Prepare one row by `SOURCE` in the `FORM` of a product. Scales: a power of two per row, or one per group."""
    wait(EARLY)
    t = tl.program_id(0).to(tl.int64)
    row = t
    if GATHER:
        row = tl.load(index_ptr + t).to(tl.int64)
    if CHUNK < BLOCK:
        _in_chunks(x_ptr, out_ptr, scale_ptr, t, width, num_groups, SOURCE, FORM, GROUP, BLOCK, CHUNK)
    else:
        make_ready(x_ptr, norm_ptr, out_ptr, scale_ptr, t, row, width, eps, num_groups, SOURCE, FORM, GROUP, BLOCK)
