"""Shared code of the dense formats: a stored number is a float of some width, without scales."""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.scheme import Format, QuantArgs, QuantTensor, plain


class Dense(Format):
    """A format whose codes are floats of `dtype`."""

    def __init__(self, name: str, dtype: torch.dtype, *options: str) -> None:
        self.name, self.bits, self.options = name, dtype.itemsize * 8, frozenset(options)
        self.dtype = self.kv_dtype = dtype

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        return self.bits

    def encode(self, weight: Tensor, args: QuantArgs | None = None) -> QuantTensor:
        stored = weight.to(self.dtype).contiguous()
        if self.dtype == torch.float16 and weight.dtype != torch.float16 and not stored.isfinite().all():
            largest = weight.abs().max().item()
            raise ConfigError(f"a weight of size {largest:g} does not fit {self.name} (at most 65504); use bf16")
        return QuantTensor(self.name, (weight.shape[0], weight.shape[1]), {"weight": stored})

    def decode(self, q: QuantTensor) -> Tensor:
        return plain(q).parts["weight"].float()

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x.to(self.dtype), None

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return codes.float()
