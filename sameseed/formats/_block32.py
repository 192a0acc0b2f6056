"""Shared code of llama.cpp's blocks of 32 values with a scale each: Q4_1, Q5_0, Q5_1 and IQ4_NL (ggml-common.h).

Q4_0 and Q8_0 are int4 and int8 in groups of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.formats._coded import Coded, bf16_scales, divided, grouped
from sameseed.scheme import QuantArgs, QuantTensor, over


class Block32(Coded):
    """A value is scale * (code - zero), or scale * code - least if `scale_parts` names minima.

    Parts: "codes" uint8 [O, K] (the low `bits` bits count), "scales" fp16 or bf16 [O, K / 32] and, where there are
    minima, "least" [O, K / 32]. A row whose width 32 does not divide is one block; no kernel supports this.

    Codes and scales of llama.cpp files are kept unchanged. `encode` rounds each block's range to nearest, with bf16
    scales. In a matrix product the activation rows are quantized to int8 in blocks of 32 (`quantize_rows`), as in
    llama.cpp.
    """

    options = frozenset({"activations"})
    groups = (32,)
    zero = 0

    @property
    def minima(self) -> bool:
        return "least" in self.scale_parts

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        return self.bits + 16 * len(self.scale_parts) / (args.group or width)

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        x, top = grouped(weight, args.group), (1 << self.bits) - 1
        low, high = x.aminmax(dim=-1)  # [O, K / 32]
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        if not self.minima:
            scales = bf16_scales(torch.maximum(high, -low), top - self.zero)
            return self.stored(divided(x, scales).round_().add_(self.zero).clamp_(0, top).to(torch.uint8), scales)
        least, scales = bf16_scales(-low, 1.0), bf16_scales(over(high, top) - over(low, top), 1.0)
        shift = divided(least.float()[..., None], scales)
        codes = divided(x, scales).add_(shift).round_().clamp_(0, top)
        q = self.stored(codes.to(torch.uint8), scales)
        return QuantTensor(q.format, q.shape, {**q.parts, "least": least})

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return codes.bitwise_and((1 << self.bits) - 1).float().sub_(self.zero)

    def decode(self, q: QuantTensor) -> Tensor:
        """The stored values, float32 [O, K], bit for bit those of the gguf package."""
        found = super().decode(q)
        if self.minima:
            least = q.parts["least"].float()
            found.view(*least.shape, q.group).sub_(least[..., None])
        return found
