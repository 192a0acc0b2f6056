"""Shared code of llama.cpp's K-quants: super-blocks of 256 values, divided into sub-blocks, with two levels of scales.

The layout and the field names are those of ggml's block_q4_K, block_q5_K and block_q6_K (ggml-common.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.formats._coded import Coded, bf16_scales, divided
from sameseed.scheme import QuantArgs, QuantTensor, over, plain

SUPER = 256  # values of a super-block


class KQuant(Coded):
    """A value is scale * step * (code - zero) - least * minimum.

    A super-block has one scale and one `least`; a sub-block has one step and one minimum. Parts: "codes" uint8 [O, K]
    (the low `bits` bits count), "steps" int8 [O, K / part], "scales" fp16 or bf16 [O, K / 256]; with `minima` also
    "minima" int8 [O, K / part] and "least" [O, K / 256]. A row whose width 256 does not divide is one super-block with
    one sub-block; no kernel supports this.

    Codes and scales of llama.cpp files are kept unchanged. `encode` uses the simplest method: it rounds each
    sub-block's range to nearest, with bf16 scales. llama.cpp's own quantizers search for better scales.

    In a matrix product the activation rows are quantized to int8 by super-block (`quantize_rows` in groups of 256; like
    llama.cpp's Q8_K except for the sign of the scale). The integer sums over a super-block are exact, and are then
    multiplied by `scale_parts` in turn.
    """

    options = frozenset({"activations"})
    part = 32  # values of a sub-block
    zero = 0
    scale_parts: tuple[str, ...] = ("least", "scales")

    @property
    def minima(self) -> bool:
        return "least" in self.scale_parts

    def sizes(self, width: int) -> tuple[int, int]:
        """The number of super-blocks and of sub-blocks in a row of `width` values."""
        return (width // SUPER, width // self.part) if width % SUPER == 0 else (1, 1)

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        supers, parts = self.sizes(width)
        return self.bits + (16 * supers + 8 * parts) * (2 if self.minima else 1) / width

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        supers, parts = self.sizes(weight.shape[1])
        x = weight.float().view(weight.shape[0], parts, -1)
        low, high = x.aminmax(dim=-1)  # [O, parts]
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        top = (1 << self.bits) - 1
        if not self.minima:
            scales, steps = two_levels(over(torch.maximum(high, -low), top - self.zero), supers, 127)
            codes = divided(x, product(scales, steps)).round_().add_(self.zero).clamp_(0, top)
            return self.stored(codes.to(torch.uint8), scales, steps)
        scales, steps = two_levels(over(high, top) - over(low, top), supers, 63)
        least, minima = two_levels(-low, supers, 63)
        unit = product(scales, steps)
        shift = divided(product(least, minima)[..., None], unit)
        codes = divided(x, unit).add_(shift).round_().clamp_(0, top)
        return self.stored(codes.to(torch.uint8), scales, steps, least, minima)

    def stored(  # type: ignore[override]
        self, codes: Tensor, scales: Tensor, steps: Tensor, least: Tensor | None = None, minima: Tensor | None = None
    ) -> QuantTensor:
        """Build a stored weight from its parts."""
        codes = codes.flatten(1).contiguous()
        found = {"codes": codes, "steps": steps, "scales": scales, "minima": minima, "least": least}
        parts = {name: t.contiguous() for name, t in found.items() if t is not None}
        return QuantTensor(self.name, (codes.shape[0], codes.shape[1]), parts)

    def decode(self, q: QuantTensor) -> Tensor:
        """The stored values, float32 [O, K], bit for bit those of the gguf package."""
        parts = plain(q).parts
        steps = product(parts["scales"], parts["steps"])
        codes = parts["codes"].bitwise_and((1 << self.bits) - 1).view(*steps.shape, q.shape[1] // steps.shape[1])
        found = codes.float().sub_(self.zero).mul_(steps[..., None])
        if self.minima:
            found.sub_(product(parts["least"], parts["minima"])[..., None])
        return found.flatten(1)


def two_levels(size: Tensor, supers: int, most: int) -> tuple[Tensor, Tensor]:
    """Express `size` [O, parts] as int8 multiples 0..most [O, parts] of bf16 super-block scales [O, n], to nearest.

    Returns scales and multiples. The largest size of a super-block gets the multiple `most`; NaN or infinity makes the
    scale NaN.
    """
    blocks = size.view(size.shape[0], supers, -1)
    scales = bf16_scales(blocks.amax(-1), most)
    return scales, divided(blocks, scales).round_().clamp_(0, most).to(torch.int8).flatten(1)


def product(scales: Tensor, steps: Tensor) -> Tensor:
    """scales [O, n] times steps [O, parts], float32 [O, parts]."""
    return (scales.float()[..., None] * steps.view(*scales.shape, steps.shape[1] // scales.shape[1]).float()).flatten(1)
