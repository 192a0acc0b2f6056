"""Kernel launches, and the fallback to the reference."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from triton.errors import TritonError

from sameseed.ops.triton.packing import interpreted as interpreted

log = logging.getLogger("sameseed.ops")
T = TypeVar("T")
broken: set[str] = set()  # ops whose kernels do not compile here; the reference computes them instead
num_launches = 0  # of kernels by this process, those of replayed graphs included
_compiled: dict[tuple[Any, ...], Any] = {}  # compiled kernels, by everything they are specialized for (see Launch.run)
# Words in errors of compilers, and of a GPU or driver that rejects a compiled kernel.
_OF_COMPILERS = ("PassManager", "LLVM", "translate", "kernel image")


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: its grid, its arguments by name (None: no tensor), and its compile-time constants."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    free: frozenset[str] = field(default=frozenset())  # sizes that kernels are not specialized for

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options. Fusion is off except where a kernel calls fma, so bits do not depend on the compiler."""
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        return {**options, "launch_pdl": True} if self.constants.get("EARLY") else options

    def run(self) -> None:
        """Launch the kernel, unless the grid is empty.

        From the second launch on, this skips Triton's binding of arguments, which takes most of a launch's time.
        """
        global num_launches
        if 0 in self.grid:
            return
        num_launches += 1
        device = next(x.device for x in self.arguments.values() if isinstance(x, torch.Tensor))
        elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
        # Everything that Triton specializes a kernel for: constants, types, and properties of addresses and sizes.
        kinds: list[Any] = []
        for name, x in self.arguments.items():
            if isinstance(x, torch.Tensor):
                kinds.append((x.dtype, x.data_ptr() % 16 == 0))
            elif type(x) is int:
                kinds.append(x < 1 << 31 if name in self.free else (x == 1, x % 16 == 0, x < 1 << 31))
            else:
                kinds.append(type(x))
        how = device.index, id(self.kernel), self.warps, self.stages
        key = (*how, (*self.arguments, *self.constants), *self.constants.values(), *kinds)
        with torch.cuda.device(device) if elsewhere else nullcontext():  # Triton uses the current device
            found = _compiled.get(key)
            if found is None:
                _compiled[key] = self.kernel[self.grid](**self.arguments, **self.constants, **self.options)
            else:
                grid = (*self.grid, 1, 1)[:3]
                given = {**self.arguments, **self.constants}
                found[grid](*[given[name] for name in self.kernel.arg_names])


def cannot_compile(error: Exception) -> bool:
    """Whether a launch failed before the kernel ran. Errors of a running GPU, and out of memory, must not be hidden."""
    if isinstance(error, TritonError | subprocess.CalledProcessError | FileNotFoundError):
        return True
    said = str(error)
    if isinstance(error, AssertionError):
        return "libcuda.so cannot found" in said  # Triton's message if it cannot link a launcher
    # Only RuntimeError itself: errors of a running GPU have subclasses (torch.OutOfMemoryError) or other messages.
    return type(error) is RuntimeError and ("compiler" in said.lower() or any(word in said for word in _OF_COMPILERS))


def guarded(what: str, kernel: Callable[[], T], reference: Callable[[], T]) -> T:
    """The result of `kernel()`, or of `reference()` if the kernel does not compile, which is logged once."""
    if what in broken:
        return reference()
    try:
        return kernel()
    except Exception as error:
        if not cannot_compile(error):
            raise
        broken.add(what)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning(
            "the triton kernel of %s does not compile here (%s); using the reference, which is slow", what, reason
        )
        return reference()
