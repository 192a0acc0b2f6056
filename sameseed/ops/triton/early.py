"""Programmatic dependent launch (compute capability 9.0): a kernel begins before the previous kernel has ended.

Every such kernel waits until its predecessor has completely ended, so chains of kernels keep their order. Before
waiting it may read only data that was complete when the pass began, such as the batch.
"""

# Kernels are written in Triton's language, so they have no type annotations.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait until all previous kernels have ended and their writes are visible; then let the next kernel begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
