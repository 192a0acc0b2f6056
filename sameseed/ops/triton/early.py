"""Programmatic dependent launch: a kernel begins while the one before it ends, and waits before it reads (9.0).

Every kernel launched so waits for all of its predecessor first, so that chains keep their order. Weights alone may be
asked for before: nothing writes them while a pass runs.
"""

# Kernels are Triton's language, not Python's: types and docstrings stay outside.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(EARLY: tl.constexpr):
    """The kernels before are done, and what they wrote is there; the next one may begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch(w_ptr, outputs_at, share, depth, outputs, num_steps, DENSE: tl.constexpr, WIDTH: tl.constexpr,
          SPLIT: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """The words of a share's first steps into the second cache, by lines of 128 bytes."""
    n = tl.minimum(outputs_at, outputs - 1).to(tl.int64)
    start = share * tl.cdiv(num_steps, SPLIT)
    for i in tl.static_range(STEPS):
        step = tl.minimum(start + i, num_steps - 1)
        if DENSE:
            at = n * depth + step * WIDTH
        else:
            at = (n // 32 * num_steps + step) * (32 * WIDTH) + n % 32 * WIDTH  # packing._fold
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(w_ptr + at).to(tl.int64)], tl.int32, False, 1
        )
