"""The native CPU backend: C++ kernels for AVX-512, AVX2 and any other processor, chosen when the first one runs.

All instruction sets and all numbers of threads give the same bits, because csrc/kernels.h fixes the order of sums. The
environment variable SAMESEED_ISA selects `avx512bf16`, `avx512vnni`, `avx512`, `avxvnni`, `avx2`, `portable` or `amx`.

The ops are in `_native_rows` and `_native_cache`, recorded passes in `_replay`.
"""

from __future__ import annotations

from sameseed.ops._layout import SERVED
from sameseed.ops._native_cache import (
    KV_FORMATS,
    attention,
    attention_rounding,
    conv,
    delta,
    gate,
    move_kv,
    rope_store,
    store_kv,
    take,
)
from sameseed.ops._native_rows import (
    DTYPES,
    embedding,
    experts,
    gelu_mul,
    product,
    rms_norm,
    rope,
    serves,
    silu_mul,
    softcap,
)
from sameseed.ops._packed import encode, pack, read, unpack
from sameseed.ops._replay import PlanReplay

try:
    from sameseed import _native
    from sameseed._native import available_cores, isa, limit_threads, num_launches, num_threads, set_num_threads
except ImportError as error:
    _missing: str | None = (
        f"the native module is not built ({error}); run `make build`, or `pip install` the package again"
    )
else:
    _missing = None

row_invariant = True
DEVICES = frozenset({"cpu"})
# Formats with kernels for float rows. `serves` also covers weights whose rows are quantized.
LINEAR_FORMATS = frozenset(DTYPES) | {name for name, rows in SERVED if rows is None}
replayer = PlanReplay  # `forward(ops, batch, cache, captures)` through recorded plans: the same bits, less Python


def unavailable() -> str | None:
    """The reason why the native kernels cannot run here, with the remedy; None if they can."""
    if _missing is not None:
        return _missing
    try:
        _native.isa()
    except ValueError as error:
        return f"{error}; mend or unset SAMESEED_ISA"
    return None


def has_kernel(name: str, activations: str | None) -> bool:
    """Whether there is a kernel for weights in format `name` with these activations."""
    return name in DTYPES or (name, activations) in SERVED
