"""Shelf of backends, and the table of ops that a model calls.

Letters: T rows of a pass, B sequences, N draft nodes, R rows whose logits are wanted, C hidden, H and Hk heads and KV
heads, D head dimension, V vocabulary, O x K weight, G group, P positions.

A backend is a module that defines any subset of the ops in `reference.py`, which is the specification, and declares
`row_invariant`, `LINEAR_FORMATS`, `KV_FORMATS` and `unavailable()`. What it lacks falls through to the reference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from foretoken import registry
from foretoken.batch import Batch
from foretoken.errors import ConfigError
from foretoken.formats.scheme import KVLayer, QuantTensor
from foretoken.ops import reference

log = logging.getLogger("foretoken.ops")


@cache
def _say_once(text: str) -> None:
    log.warning(text)


class Ops:
    """The ops of one backend, the reference behind it. Signatures and shapes are those of `ops/reference.py`."""

    def __init__(self, backend: ModuleType) -> None:
        self.backend = backend
        self.name = backend.__name__.rsplit(".", 1)[-1]
        self.row_invariant: bool = backend.row_invariant and reference.row_invariant
        self._embedding: Callable[[Tensor, QuantTensor], Tensor] = getattr(backend, "embedding", reference.embedding)
        self.rms_norm: Callable[[Tensor, Tensor, float], Tensor] = self._pick("rms_norm")
        self.rope: Callable[[Tensor, Tensor, Tensor], Tensor] = self._pick("rope")
        self.silu_mul: Callable[[Tensor], Tensor] = self._pick("silu_mul")
        self._linear: Callable[[Tensor, QuantTensor, Tensor | None], Tensor] = self._pick("linear")

    def _pick(self, op: str) -> Callable[..., Tensor]:
        chosen = getattr(self.backend, op, None)
        if chosen is None:
            _say_once(f"backend {self.name!r} has no {op}; using the reference (slow; see `foretoken info`)")
            chosen = getattr(reference, op)
        picked: Callable[..., Tensor] = chosen
        return picked

    def embedding(self, token_ids: Tensor, w: QuantTensor) -> Tensor:
        """Rows token_ids [T] of an embedding [V, C]; returns float32 [T, C]."""
        known = w.format in self.backend.LINEAR_FORMATS
        return (self._embedding if known else reference.embedding)(token_ids, w)

    def linear(self, x: Tensor, w: QuantTensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] times w [O, K] transposed, plus bias [O]."""
        if w.format in self.backend.LINEAR_FORMATS:
            return self._linear(x, w, bias)
        _say_once(
            f"no {self.name!r} kernel for weights in {w.format!r}; using the reference (slow; see `foretoken info`)"
        )
        return reference.linear(x, w, bias)

    def _kv(self, op: str, layer: KVLayer) -> Callable[..., Tensor]:
        if layer.format in self.backend.KV_FORMATS:
            return self._pick(op)
        _say_once(f"no {self.name!r} kernel for a KV cache in {layer.format!r}; using the reference (slow)")
        picked: Callable[..., Tensor] = getattr(reference, op)
        return picked

    def store_kv(self, k: Tensor, v: Tensor, layer: KVLayer, slots: Tensor) -> None:
        """Encode k, v [T, Hk, D] into the cache rows slots [T]."""
        self._kv("store_kv", layer)(k, v, layer, slots)

    def move_kv(self, layer: KVLayer, src: Tensor, dst: Tensor) -> None:
        """Copy cache rows src [n] to dst [n]."""
        self._kv("move_kv", layer)(layer, src, dst)

    def attention(self, q: Tensor, layer: KVLayer, batch: Batch, scale: float, window: int | None = None) -> Tensor:
        """Attention of q [T, H, D] over the paged cache; returns [T, H, D]."""
        return self._kv("attention", layer)(q, layer, batch, scale, window)


@cache
def resolve(name: str = "auto", device: str = "cpu") -> Ops:
    """The ops of a backend by name; `auto`: the fastest that runs on the device. Raises ConfigError, RegistryError."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r}: PyTorch sees no CUDA GPU here; use --device cpu, or install a driver and a CUDA build"
        )
    if name != "auto":
        module = registry.load("ops", name)
        reason = module.unavailable()
        if reason is not None:
            raise ConfigError(f"backend {name!r} cannot run here: {reason}")
        return Ops(module)
    if device == "cpu" and "cpu" in registry.names("ops"):
        module = registry.load("ops", "cpu")
        reason = module.unavailable()
        if reason is None:
            return Ops(module)
        _say_once(f"the cpu backend cannot run ({reason}); using the reference, which is slow")
    return Ops(reference)


def set_num_threads(threads: int) -> None:
    """Threads of every backend that counts them, and of PyTorch."""
    torch.set_num_threads(threads)
    if "cpu" in registry.names("ops"):
        module = registry.load("ops", "cpu")
        if module.unavailable() is None:
            module.set_num_threads(threads)
