"""Memory for weights: large tensors on huge pages, where the system gives them."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = 1 << 21  # bytes of a huge page


def roomy(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """An empty tensor, aligned to a cache line; a large one lies on huge pages: fewer look-ups while weights stream."""
    size = math.prod(shape) * dtype.itemsize
    if (device is not None and device.type != "cpu") or size < 2 * _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones stay small
    with suppress(OSError):  # a kernel without them: the memory serves as it is
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` as long as a part of it lives
    start = -whole.data_ptr() % _HUGE  # untouched pages before it take no memory
    return whole[start : start + size].view(dtype).view(shape)
