"""The GPU backend: Triton kernels for one NVIDIA GPU of compute capability 8.0 or newer.

Products multiply on tensor cores: rows enter as float16 under a power of two of their own (bfloat16 for bf16 weights,
float32 for fp32 ones), or quantized where the weight asks for it; sums are float32 or exact integers. What there is no
kernel for falls through to the reference, on the same device.
"""

from __future__ import annotations

from functools import cache

import torch

from foretoken.ops.triton import packing
from foretoken.ops.triton.packing import embedding, pack, serves, unpack

try:
    import triton as _triton
except ImportError as error:
    _missing: str | None = (
        f"Triton is not installed ({error}); `pip install triton` on Linux, of the version that PyTorch asks for"
    )
else:
    _missing = None
    from foretoken.ops.triton.guard import interpreted
    from foretoken.ops.triton.linear import linear, norm_linear, rms_norm, rope, silu_linear, silu_mul

row_invariant = True
LINEAR_FORMATS = packing.DENSE | frozenset(packing.CODED)
KV_FORMATS: frozenset[str] = frozenset()
OLDEST = (8, 0)


@cache
def unavailable() -> str | None:
    """Why the kernels cannot run here, with the remedy; None if they can."""
    if _missing is not None:
        return _missing
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU; install a driver and a CUDA build of PyTorch, or use --device cpu"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        return (
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, the kernels need "
            "8.0; use --backend reference"
        )
    return None


__all__ = [
    "KV_FORMATS",
    "LINEAR_FORMATS",
    "embedding",
    "linear",
    "norm_linear",
    "pack",
    "rms_norm",
    "rope",
    "row_invariant",
    "serves",
    "silu_linear",
    "silu_mul",
    "unavailable",
    "unpack",
]
