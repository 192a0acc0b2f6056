"""KV cache formats in a few lines of PyTorch: the oracle for the codes and scales that kernels store and read.

A row and head with a = max |x| has the scale a / L and the codes x * (L / a) to nearest even, with L the largest code.
NaN or infinity: scale NaN, codes 0. a < 2^-100: scale and codes 0. Other formats are their own oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sameseed import scheme

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
STORED = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8_e4m3": torch.uint8,
    "fp8_e5m2": torch.uint8,
}
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KV_FORMATS = sorted(STORED)


@dataclass(frozen=True)
class KvOracle:
    """How one format stores rows of the KV cache."""

    name: str

    @property
    def kv_dtype(self) -> torch.dtype:
        return STORED[self.name]

    @property
    def scaled(self) -> bool:
        return self.name in LARGEST

    def width(self, dim: int) -> int:
        """The number of elements that a row of `dim` values takes."""
        return dim

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes [T, Hk, D] and scales [T, Hk] of x [T, Hk, D]."""
        if not self.scaled:
            return x.to(self.kv_dtype), None
        largest = torch.tensor(LARGEST[self.name])
        a = x.abs().amax(-1)
        poisoned, empty = ~x.isfinite().all(-1), a < 2.0**-100
        scales = torch.where(empty, torch.zeros(()), a / largest)
        y = x * (largest / a)[..., None]
        y = torch.where((poisoned | empty)[..., None], torch.zeros(()), y).clamp(-largest, largest)
        codes = y.to(FP8[self.name]).view(torch.uint8) if self.name in FP8 else y.round().to(torch.int8)
        return codes, torch.where(poisoned, torch.tensor(torch.nan), scales)

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        """The stored values, float32 [T, Hk, D]."""
        plain = (codes.view(FP8[self.name]) if self.name in FP8 else codes).float()
        return plain if scales is None else plain * scales[..., None]


class Itself:
    """A format as its own oracle."""

    def __init__(self, name: str) -> None:
        self.format = scheme.kv_format(name)
        assert self.format.kv_dtype is not None
        self.name, self.kv_dtype = name, self.format.kv_dtype
        self.scaled = self.format.encode_kv(torch.zeros(1, 1, 2))[1] is not None
        self.encode_kv, self.decode_kv = self.format.encode_kv, self.format.decode_kv

    def width(self, dim: int) -> int:
        return self.encode_kv(torch.zeros(1, 1, dim))[0].shape[-1]


def kv_oracle(name: str) -> KvOracle | Itself:
    return KvOracle(name) if name in STORED else Itself(name)
