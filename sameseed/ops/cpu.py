"""The native CPU backend: C++ kernels for AVX-512, AVX2 and any other processor, chosen when the first one runs.

All instruction sets and all numbers of threads give the same bits (csrc/kernels.h says in which order sums run). The
environment variable SAMESEED_ISA forces `avx512bf16`, `avx512vnni`, `avx512`, `avxvnni`, `avx2`, `portable` or `amx`.

Its ops lie in `_native_rows` and `_native_cache`, recorded passes in `_replay`.
"""

from __future__ import annotations

from typing import Any

from sameseed.errors import ConfigError
from sameseed.ops import _packed
from sameseed.ops._native_cache import KV_FORMATS, attention, attention_rounding, move_kv, rope_store, store_kv
from sameseed.ops._native_rows import CODES, DTYPES, embedding, packer, product, rms_norm, rope, serves, silu_mul
from sameseed.ops._replay import PlanReplay
from sameseed.scheme import QuantTensor

__all__ = [
    "KV_FORMATS",
    "attention",
    "attention_rounding",
    "embedding",
    "move_kv",
    "product",
    "rms_norm",
    "rope",
    "rope_store",
    "serves",
    "silu_mul",
    "store_kv",
]

try:
    from sameseed import _native
except ImportError as error:
    _missing: str | None = (
        f"the native module is not built ({error}); run `make build`, or `pip install` the package again"
    )
else:
    _missing = None

row_invariant = True
DEVICES = frozenset({"cpu"})
# Formats whose kernels take float rows; `serves` knows of weights that want their rows quantized as well.
LINEAR_FORMATS = frozenset(CODES) | {name for name, rows in _packed.SERVED if rows is None}
encode = _packed.encode


def unavailable() -> str | None:
    """Why the native kernels cannot run here, with the remedy; None if they can."""
    if _missing is not None:
        return _missing
    try:
        _native.isa()
    except ValueError as error:
        return f"{error}; mend or unset SAMESEED_ISA"
    return None


def isa() -> str:
    """The instruction set in use: avx512bf16, avx512vnni, avx512, avxvnni, avx2, portable or amx."""
    return _native.isa()


def set_num_threads(threads: int) -> None:
    """Let each call use this many threads. Raises ConfigError below 1."""
    try:
        _native.set_num_threads(threads)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def num_threads() -> int:
    """Threads that a call of this thread may use."""
    return _native.num_threads()


def available_cores() -> int:
    """Physical cores that this process may use: its affinity mask, at most its cgroup's quota."""
    return _native.available_cores()


def limit_threads(threads: int) -> None:
    """Limit the threads of this thread's calls, which then are its own; 0: no limit. Raises ConfigError."""
    try:
        _native.limit_threads(threads)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def replayer(forward: Any, ops: Any) -> Any:
    """`forward(ops, batch, cache, captures)` through recorded plans (ops/_replay.py); the same bits, less Python."""
    return PlanReplay(forward, ops)


def pack(w: QuantTensor) -> QuantTensor:
    """`w` in blocks of 32 outputs as the kernels read it; itself where they take it as it is, or not at all."""
    packed: QuantTensor = packer(w).pack(w)
    return packed


def unpack(w: QuantTensor) -> QuantTensor:
    """The inverse of pack."""
    plain: QuantTensor = packer(w).unpack(w)
    return plain


def has_kernel(name: str, activations: str | None) -> bool:
    """Whether there is a kernel for weights in format `name` and rows of these activations."""
    return name in DTYPES or (name, activations) in _packed.SERVED
