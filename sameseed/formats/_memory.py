"""Memory for weights: large tensors on huge pages, where the system supports them."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = 1 << 21  # bytes of a huge page


def roomy(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """An uninitialized tensor, aligned to a cache line; a large one lies on huge pages, for fewer TLB misses."""
    size = math.prod(shape) * dtype.itemsize
    if (device is not None and device.type != "cpu") or size < 2 * _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages stay small
    with suppress(OSError):  # a kernel without huge pages: normal pages are used
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive as long as a view exists
    start = -whole.data_ptr() % _HUGE  # pages before `start` are never touched, so they take no memory
    return whole[start : start + size].view(dtype).view(shape)
