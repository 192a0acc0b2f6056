"""How numbers are stored: QuantTensor (a weight), KVLayer (a layer of the cache), QuantScheme (a choice).

A module on this shelf holds one `FORMAT`, an object that has what `Format` below lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from foretoken import registry
from foretoken.errors import ConfigError


@dataclass(frozen=True)
class QuantTensor:
    """A weight [O, K] as one format stores it; `parts` are its tensors by name (dense formats: one, "weight").

    `activations` says how rows of x enter the product: None as float32, "int8" quantized per token and group.
    `layout` is "plain", the format's own, or the name of the backend that packed the tensors for its kernels.
    """

    format: str
    shape: tuple[int, int]
    parts: Mapping[str, Tensor]
    activations: str | None = None
    layout: str = "plain"

    @property
    def group(self) -> int:
        """Columns that share a scale; K where a row has one scale, or none."""
        scales = self.parts.get("scales")
        return self.shape[1] // scales.shape[1] if scales is not None and scales.ndim > 1 else self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that the stored tensors take."""
        return sum(t.numel() * t.element_size() for t in self.parts.values())


@dataclass(frozen=True)
class KVLayer:
    """Keys and values of one layer: k, v [num_blocks, block_size, Hk, D] in the format's storage type.

    Scales are float32 [num_blocks, block_size, Hk], one per token and head, or None for formats without.
    """

    format: str
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


class Format(Protocol):
    """A number format, for weights and, where `kv_dtype` is not None, for the cache."""

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """Storage type of cached rows; None if the format does not serve the cache."""

    def encode(self, weight: Tensor) -> QuantTensor:
        """Store weight [O, K], rounded to nearest."""

    def decode(self, q: QuantTensor) -> Tensor:
        """The stored values, float32 [O, K]."""

    def decode_rows(self, q: QuantTensor, index: Tensor) -> Tensor:
        """Rows `index` [n] of the stored values, float32 [n, K]."""

    def concat(self, parts: list[QuantTensor]) -> QuantTensor:
        """Several weights as one, along O: each row keeps its own codes and scales."""

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes [T, Hk, D] and scales float32 [T, Hk] (or None) of cache rows x [T, Hk, D]."""

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        """The inverse of encode_kv, float32."""

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """The tensors of layer `name` as a checkpoint stores them."""

    def from_checkpoint(self, name: str, tensors: Mapping[str, Tensor]) -> QuantTensor:
        """The inverse of checkpoint."""

    def config(self) -> dict[str, object]:
        """The `quantization_config` that vLLM reads; empty for dense formats."""


def get(name: str) -> Format:
    """The format of that name. Raises RegistryError with the nearest name."""
    return cast(Format, registry.load("formats", name).FORMAT)


def kv_format(name: str) -> Format:
    """The format of that name if a cache can use it. Raises ConfigError otherwise."""
    found = get(name)
    if found.kv_dtype is None:
        raise ConfigError(f"format {name!r} does not serve the KV cache; use e.g. 'bf16' or 'int8'")
    return found


DENSE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class QuantScheme:
    """Which format a model's weights take. `auto` keeps what the checkpoint stores; norms and biases stay float32."""

    weights: str = "auto"

    def encode(self, weight: Tensor) -> QuantTensor:
        """Store a dense weight [O, K] by this scheme."""
        name = DENSE.get(weight.dtype, "fp32") if self.weights == "auto" else self.weights
        return get(name).encode(weight)
