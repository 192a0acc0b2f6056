"""The 8-bit floats written once (Micikevicius et al., 2022): codes are their bits, scales are per row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.formats._coded import Coded, compressed_tensors, part, plain
from foretoken.formats.scheme import SMALLEST, QuantArgs, QuantTensor


class Float8(Coded):
    """Codes uint8, the bits of `dtype`; scale = absmax / largest of a row (weights) or of a token and head (cache)."""

    bits = 8
    kv_dtype = torch.uint8

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.largest = torch.finfo(dtype).max

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales [..., 1] of x [..., D]: nearest even, never beyond the largest; rules as quantize_rows."""
        x = x.float()
        a = x.abs().amax(-1, keepdim=True)
        usable = a.isfinite() & (a >= SMALLEST)
        scaled = torch.where(
            usable, (x * (torch.full_like(a, self.largest) / a)).clamp_(-self.largest, self.largest), 0.0
        )
        scales = torch.where(usable, a / self.largest, torch.where(a.isfinite(), 0.0, torch.nan))
        return scaled.to(self.dtype).view(torch.uint8), scales

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        return self.stored(*self._rows(weight))

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return codes.view(self.dtype).float()

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        codes, scales = self._rows(x)  # the scale is per row: a rejected draft must leave no trace
        return codes, scales.squeeze(-1)

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        return codes.contiguous().view(self.dtype).float() * scales[..., None]

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Tensors in compressed-tensors' float-quantized layout."""
        return {f"{name}.weight": plain(q).parts["codes"].view(self.dtype), f"{name}.weight_scale": q.parts["scales"]}

    def from_checkpoint(self, name: str, tensors: Mapping[str, Tensor]) -> QuantTensor:
        codes = part(name, "weight", tensors)
        if codes.dtype != self.dtype:
            raise ConfigError(f"tensor {name}.weight is {codes.dtype}, not {self.dtype}; it is no {self.name}")
        scales = part(name, "weight_scale", tensors).float().reshape(-1, 1).expand(codes.shape[0], 1)
        return self.stored(codes.view(torch.uint8), scales)

    def config(self, q: QuantTensor) -> dict[str, object]:
        if self.dtype != torch.float8_e4m3fn:
            raise ConfigError(f"no engine reads a checkpoint in {self.name}; store it as fp8_e4m3")
        return compressed_tensors("float-quantized", q, 8, "float")
