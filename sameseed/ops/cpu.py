"""The native CPU backend: C++ kernels for AVX-512, AVX2 and any other processor, chosen when the first one runs.

All instruction sets and all numbers of threads give the same bits, because csrc/kernels.h fixes the order of sums. The
environment variable SAMESEED_ISA selects `avx512bf16`, `avx512vnni`, `avx512`, `avxvnni`, `avx2`, `portable` or `amx`.

The ops are in `_native_rows` and `_native_cache`, recorded passes in `_replay`.
"""

from __future__ import annotations

from typing import Any

from sameseed.errors import ConfigError
from sameseed.ops import _packed
from sameseed.ops._native_cache import (
    KV_FORMATS,
    attention,
    attention_rounding,
    delta,
    gate,
    move_kv,
    rope_store,
    store_kv,
    take,
)
from sameseed.ops._native_rows import (
    CODES,
    DTYPES,
    embedding,
    experts,
    gelu_mul,
    packer,
    product,
    rms_norm,
    rope,
    serves,
    silu_mul,
    softcap,
)
from sameseed.ops._replay import PlanReplay
from sameseed.scheme import QuantTensor

__all__ = [
    "KV_FORMATS",
    "attention",
    "attention_rounding",
    "delta",
    "embedding",
    "experts",
    "gate",
    "gelu_mul",
    "move_kv",
    "product",
    "rms_norm",
    "rope",
    "rope_store",
    "serves",
    "silu_mul",
    "softcap",
    "store_kv",
    "take",
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
# Formats with kernels for float rows. `serves` also covers weights whose rows are quantized.
LINEAR_FORMATS = frozenset(CODES) | {name for name, rows in _packed.SERVED if rows is None}
encode = _packed.encode


def unavailable() -> str | None:
    """The reason why the native kernels cannot run here, with the remedy; None if they can."""
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
    """Set the number of threads of a call. Raises ConfigError for a number below 1 or above 1024."""
    try:
        _native.set_num_threads(threads)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def num_threads() -> int:
    """Number of threads that a call from this thread may use."""
    return _native.num_threads()


def available_cores() -> int:
    """Number of physical cores in the affinity mask of this process, at most the CPU quota of its cgroup."""
    return _native.available_cores()


def limit_threads(threads: int) -> None:
    """Limit the threads of calls from this thread, which then gets its own workers; 0: no limit.

    Raises ConfigError for a negative limit.
    """
    try:
        _native.limit_threads(threads)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def replayer(forward: Any, ops: Any) -> Any:
    """`forward(ops, batch, cache, captures)` through recorded plans (ops/_replay.py): the same bits, less Python."""
    return PlanReplay(forward, ops)


def pack(w: QuantTensor) -> QuantTensor:
    """Pack `w` in blocks of 32 outputs; returns `w` itself if the kernels read it unchanged, or not at all."""
    packed: QuantTensor = packer(w).pack(w)
    return packed


def unpack(w: QuantTensor) -> QuantTensor:
    """The inverse of pack."""
    plain: QuantTensor = packer(w).unpack(w)
    return plain


def has_kernel(name: str, activations: str | None) -> bool:
    """Whether there is a kernel for weights in format `name` with these activations."""
    return name in DTYPES or (name, activations) in _packed.SERVED
