"""Counts the kernel launches of this process: parallel sections of native kernels, and Triton's kernels.

A replayed graph launches the kernels that were recorded in it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

with suppress(ImportError):
    from sameseed import _native

T = TypeVar("T")
_triton = 0


def add(count: int = 1) -> None:
    """Count launches of Triton's kernels."""
    global _triton
    _triton += count


def recorded(record: Callable[[], T]) -> tuple[T, int]:
    """The result of `record()` and the number of launches that it recorded for later, which do not count yet."""
    before = _triton
    found = record()
    count = _triton - before
    add(-count)
    return found, count


def num_launches() -> int:
    """Kernel launches of this process so far."""
    return _triton + (_native.num_launches() if "_native" in globals() else 0)
