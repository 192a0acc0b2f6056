"""Helpers of kernels that round: powers of two, rounding to nearest even by addition, and rounding to bfloat16."""

# Kernels are written in Triton's language: they have no type annotations, and comments instead of docstrings.
from __future__ import annotations

import triton
import triton.language as tl

SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)  # scheme.SMALLEST
ROUND: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds to nearest even


@triton.jit
def power_of(largest):
    # The float32 bits of the largest power of two <= `largest`, clamped to 2^-100 .. 2^126.
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(bits, 27 << 23), 253 << 23)


@triton.jit
def inverse(bits):
    # The inverse of the power of two with these bits.
    return ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def bfloat(x):
    # Rounds x float32 to nearest even bfloat16, still as float32, like a GPU's conversion. Explicit, because the
    # interpreter's conversion truncates. Converting the rounded value is then exact everywhere.
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, rounded)
