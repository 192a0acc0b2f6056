"""Calls of kernels: described before they run (so that they can be compiled without a GPU), and guarded as they run."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from triton.errors import TritonError

from sameseed.ops.triton.interpreter import interpreted as interpreted

log = logging.getLogger("sameseed.ops")
T = TypeVar("T")
broken: set[str] = set()  # what did not compile here; the reference does it from then on
_compiled: dict[tuple[Any, ...], Any] = {}  # by all that a kernel is compiled for (`Launch._key`)
_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


# Of a compiler's steps, and of a GPU or a driver that does not take what they made.
_OF_COMPILERS = ("PassManager", "LLVM", "translate", "kernel image")
_BY_16: list[list[object]] = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: its grid, its arguments by name (None: no tensor), and what it is compiled for."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    free: frozenset[str] = field(default=frozenset())  # sizes that no compiled kernel may depend on

    @property
    def options(self) -> dict[str, Any]:
        """No fusion of product and sum but where the kernel says fma: bits do not hang on the compiler."""
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        return {**options, "launch_pdl": True} if self.constants.get("EARLY") else options

    def run(self) -> None:
        """Launch it; nothing where the grid is empty.

        From the second time on without Triton's binding of arguments, which takes most of a launch's time.
        """
        if 0 in self.grid:
            return
        device = next(x.device for x in self.arguments.values() if isinstance(x, torch.Tensor))
        elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
        # All that Triton compiles a kernel for: constants, types, and what it asks of addresses and sizes.
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
        with torch.cuda.device(device) if elsewhere else nullcontext():  # Triton takes the current one
            found = _compiled.get(key)
            if found is None:
                _compiled[key] = self.kernel[self.grid](**self.arguments, **self.constants, **self.options)
            else:
                grid = (*self.grid, 1, 1)[:3]
                given = {**self.arguments, **self.constants}
                found[grid](*[given[name] for name in self.kernel.arg_names])

    def compile(self, capability: int) -> Any:
        """Compile it for a GPU of that capability (90: 9.0), which need not be here, specialized as `run` would."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature: dict[str, str] = {}
        able = {"FLOAT8": capability >= 89, "EARLY": self.constants.get("EARLY") and capability >= 90}
        constants = {name: able.get(name, value) for name, value in self.constants.items()}
        aligned: dict[tuple[int, ...], list[list[object]]] = {}
        for place, name in enumerate(self.kernel.arg_names):
            value, bound = self.arguments.get(name), name not in self.free
            if isinstance(value, torch.Tensor):
                signature[name], aligned[place,] = _POINTERS[value.dtype], _BY_16
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value is None or (bound and value == 1):
                signature[name] = "constexpr"
                constants.setdefault(name, value)
            else:
                signature[name] = "i32"
                if bound and value % 16 == 0:
                    aligned[place,] = _BY_16
        source = ASTSource(self.kernel, signature, constants, aligned)
        options = replace(self, constants=constants).options
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def cannot_compile(error: Exception) -> bool:
    """Whether a launch failed before it ran. Errors of a GPU at work, and a full memory, are not for hiding."""
    if isinstance(error, TritonError | subprocess.CalledProcessError | FileNotFoundError):
        return True
    said = str(error)
    if isinstance(error, AssertionError):
        return "libcuda.so cannot found" in said  # Triton's words, where it looks for what a launcher links against
    # Of the type itself alone: what a GPU at work raises has types of its own (torch.OutOfMemoryError), or other words.
    return type(error) is RuntimeError and ("compiler" in said.lower() or any(word in said for word in _OF_COMPILERS))


def guarded(what: str, kernel: Callable[[], T], reference: Callable[[], T]) -> T:
    """What `kernel()` gives; what `reference()` does where the kernel does not compile, which is said once."""
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
