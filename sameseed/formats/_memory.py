"""Memory for weights and caches: huge pages where they pay, and rows that take memory only once they are written."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

from sameseed.memory import HUGE, brought_in

LINE = 64  # bytes of a cache line
SHARED = 32 * HUGE  # bytes that tensors of an arena share; one of more than a quarter of that has its own memory


def roomy(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """An uninitialized tensor, aligned to a cache line; a large one lies on huge pages, for fewer TLB misses."""
    size = math.prod(shape) * dtype.itemsize
    if (device is not None and device.type != "cpu") or size < 2 * HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    return _mapped(size, [(0, size)]).view(dtype).view(shape)


class Arena:
    """Memory for the weights of a model, side by side on huge pages: a matrix alone would end on normal ones.

    Passes over a few rows take 2 to 12 % less time so (docs/log/2026-q4.md, "Weights side by side on huge pages").
    Memory is given back once none of the tensors in it is left.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()
        self._ahead = brought_in()  # comes first
        if self._ahead is not None:
            self._ahead.stop()
            start = self._ahead.start
            self._left = torch.frombuffer(self._ahead.memory, dtype=torch.uint8)[start : start + self._ahead.size]

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            if device.type != "cpu" or (4 * size > SHARED and size > len(self._left)):
                return roomy(shape, dtype, device)
            if size > len(self._left):
                self.close()
                self._left = roomy((SHARED,), torch.uint8)
            taken, self._left = self._left[:size], self._left[-(-size // LINE) * LINE :]
        return taken.view(dtype).view(shape)

    def close(self) -> None:
        """Give back memory that was brought in and is not used."""
        if self._ahead is not None:
            self._ahead.give_back(self._ahead.size - len(self._left))
            self._ahead = None


def reserved(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [layers, ...]. On a CPU a page takes memory once something is written to it.

    The first 2 MiB of each layer lie on normal pages, so that a short text takes little; the rest lies on huge pages.
    So a cache never takes more than twice its written rows and 2 MiB a layer.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    layer = size // shape[0]
    return _mapped(size, [(i * layer + HUGE, (i + 1) * layer) for i in range(shape[0])]).view(dtype).view(shape)


def _mapped(size: int, huge: list[tuple[int, int]]) -> Tensor:
    """`size` bytes of zeros that are not in memory yet; huge pages are asked for between each begin and end."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)  # shared pages stay small
    memory = mmap.mmap(-1, size + HUGE, flags=flags)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive as long as a view exists
    start = -whole.data_ptr() % HUGE  # pages before `start` are never touched, so they take no memory
    for begin, end in huge:
        begin, end = start + -(-begin // HUGE) * HUGE, start + end // HUGE * HUGE
        if begin < end and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages: normal pages are used
                memory.madvise(mmap.MADV_HUGEPAGE, begin, end - begin)
    return whole[start : start + size]
