"""What kernels that round have in common: powers of two, rounding to nearest even by a sum, and bfloat16."""

# Kernels are Triton's language, not Python's: types and docstrings stay outside.
from __future__ import annotations

import triton
import triton.language as tl

SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)  # scheme.SMALLEST
ROUND: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # added and taken away, it rounds to nearest even


@triton.jit
def power_of(largest):
    # The power of two at or below `largest` as float32's bits, kept within 2^-100 .. 2^126.
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(bits, 27 << 23), 253 << 23)


@triton.jit
def inverse(bits):
    # One over the power of two of these bits.
    return ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def bfloat(x):
    # x float32 with the bits that bfloat16 has not rounded away, to even: what a GPU's conversion does, spelt out
    # because the interpreter's cuts them off; of values that are exact all make the same.
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, rounded)
