"""The GPU backend: Triton kernels for one NVIDIA GPU of compute capability 8.0 or newer.

Products use tensor cores. Rows are stored as float16 with a power of two as scale (bfloat16 for bf16 weights, float32
for fp32 weights), or quantized if the weight requires it. Sums are float32 or exact integers. Ops without a kernel fall
back to the reference on the same device.
"""

from __future__ import annotations

from functools import cache

import torch

from sameseed import devices
from sameseed.ops.triton import packing
from sameseed.ops.triton.packing import embedding, interpreted, pack, serves, unpack

_missing: str | None = None
try:
    from sameseed.ops.triton.attention import attention, attention_rounding
    from sameseed.ops.triton.dispatch import gelu_mul, product, rms_norm, silu_mul
    from sameseed.ops.triton.graphs import replayer
    from sameseed.ops.triton.kv import move_kv, move_stacked, rope, rope_store, store_kv
    from sameseed.ops.triton.prepared import product_rounding
    from sameseed.ops.triton.sampling import choose
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "triton":
        raise
    _missing = f"Triton is not installed ({error}); `pip install '.[gpu]'` on Linux"


row_invariant = True
looks_ahead = True  # `product` accepts what its result is used for next (`Then`)
LINEAR_FORMATS = packing.DENSE | packing.CODED
KV_FORMATS = frozenset({"fp32", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2"})
DEVICES = frozenset({"cpu" if interpreted() else "cuda"})
OLDEST = (8, 0)


@cache
def unavailable(device: str = "cuda") -> str | None:
    """The reason why the kernels cannot run here, or not on this GPU, with the remedy; None if they can."""
    if _missing is not None:
        return _missing
    if interpreted():
        return None
    if (reason := devices.no_cuda()) is not None:
        return reason
    place = torch.device(device)
    major, minor = torch.cuda.get_device_capability(place)
    if (major, minor) < OLDEST:
        return (
            f"{torch.cuda.get_device_name(place)} has compute capability {major}.{minor}, the kernels need 8.0; use "
            "--backend reference"
        )
    return None
