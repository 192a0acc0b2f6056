"""Programmatic dependent launch: a kernel begins while the one before it ends, and waits before it reads (9.0).

Every kernel launched so waits for all of its predecessor, so chains keep their order. Before that it may read what lay
there when the pass began, such as the batch.
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
