"""Format int8: symmetric 8-bit integers; weights with a scale per channel or group, KV rows one per token and head."""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.formats._coded import Coded, bf16_scales, compressed_tensors, divided, grouped
from sameseed.formats.int4 import pack_int32
from sameseed.scheme import QuantArgs, QuantTensor, plain, quantize_rows


class Int8(Coded):
    """Codes in -127..127; scales are absmax / 127 of a row (float32), or of a group (bfloat16)."""

    name = "int8"
    bits = 8
    kv_dtype = torch.int8
    options = frozenset({"group", "activations", "activations-outliers"})

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        if args.group is None:
            return self.stored(*self.rows(weight))
        x = grouped(weight, args.group)
        scales = bf16_scales(x.abs().amax(-1), 127.0)
        codes = divided(x, scales).round_().clamp_(-127, 127).to(torch.int8)
        return self.stored(codes, scales)

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return codes.float()

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows(x)

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Tensors in compressed-tensors' int-quantized layout; with float activations in its pack-quantized layout."""
        codes, scales = plain(q).parts["codes"], q.parts["scales"]
        if q.activations is not None:
            return {f"{name}.weight": codes, f"{name}.weight_scale": scales}
        return {
            f"{name}.weight_packed": pack_int32(codes.view(torch.uint8) ^ 128, 8),  # value + 128
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(q.shape, dtype=torch.int64),
        }

    def config(self, q: QuantTensor) -> dict[str, object]:
        if q.activations == "outliers":  # compressed-tensors has no such setting
            return {}
        return compressed_tensors("int-quantized" if q.activations else "pack-quantized", q, 8, "int")


FORMAT = Int8()
