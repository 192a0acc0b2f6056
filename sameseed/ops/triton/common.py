"""Helpers of kernels: the wait for the previous kernel, powers of two, and rounding to nearest even and to bfloat16."""

# Kernels are written in Triton's language, so they have no type annotations.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)  # scheme.SMALLEST
ROUND: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds to nearest even


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait until all previous kernels have ended and their writes are visible; then let the next kernel begin.

    For programmatic dependent launch (compute capability 9.0): a kernel begins before the previous kernel has ended,
    and chains of kernels keep their order. Before waiting it may read only data that was complete when the pass began,
    such as the batch.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


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
