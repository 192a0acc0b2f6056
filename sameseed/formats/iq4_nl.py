"""Format iq4_nl: 4-bit indices of sixteen values with a scale for each 32 (llama.cpp's IQ4_NL, and IQ4_XS).

IQ4_XS multiplies a scale of 256 values by 6-bit steps. Here each 32 have the product, exact in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.formats._blocks import Blocks
from sameseed.formats._coded import bf16_scales, divided, grouped
from sameseed.scheme import QuantArgs, QuantTensor

VALUES = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
BORDERS = (VALUES[1:] + VALUES[:-1]) / 2


class IQ4NL(Blocks):
    """Codes 0..15 stand for `VALUES` (ggml's kvalues_iq4nl)."""

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        x = grouped(weight, args.group)
        scales = bf16_scales(x.abs().amax(-1), 127.0)
        codes = torch.bucketize(divided(x, scales), BORDERS.to(x.device))
        return self.stored(codes.to(torch.uint8), scales)

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        table = VALUES.to(codes.device)  # looked up in chunks, because an index takes 8 bytes
        return torch.cat([table[part.bitwise_and(15).long()] for part in torch.split(codes, 1024)])


FORMAT = IQ4NL("iq4_nl", bits=4, zero=0)
