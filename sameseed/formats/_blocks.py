"""Shared code of llama.cpp's blocks of 32 values, and of its K-quants: super-blocks of 256 with two levels of scales.

The layouts and the field names are those of ggml-common.h (block_q4_1, block_q4_K and others). Q4_0 and Q8_0 are int4
and int8 in groups of 32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sameseed.formats._coded import Coded, bf16_scales, divided, grouped
from sameseed.scheme import QuantArgs, QuantTensor, over, plain

SUPER = 256  # values of a super-block


class Blocks(Coded):
    """A value is scale * step * (code - zero) - least * minimum; blocks of 32 have neither steps nor minima: both 1.

    A block has one scale and one `least`; in a super-block each sub-block has one step and one minimum, 0..63 (0..15 in
    llama.cpp's Q2_K files; negative steps where there are no minima). Parts: "codes" uint8 [O, K] (the low `bits` bits
    count), "scales" and "least" fp16 or bf16 [O, blocks], "steps" and "minima" int8 [O, sub-blocks]. A row whose width
    the block's does not divide is one block with one sub-block; no kernel supports this.

    Codes and scales of llama.cpp files are kept unchanged. `encode` uses the simplest method: it rounds each
    sub-block's range to nearest, with bf16 scales. llama.cpp's own quantizers search for better scales.

    In a matrix product the activation rows are quantized to int8 by block (`quantize_rows` in groups of 32 or 256; like
    llama.cpp's Q8_K except for the sign of the scale). The integer sums over a block are exact, and are then multiplied
    by `scale_parts` in turn.
    """

    options = frozenset({"activations"})

    def __init__(self, name: str, bits: int, *, zero: int | None = None, part: int | None = None) -> None:
        """`zero`: None where there are minima. `part`: values of a sub-block of super-blocks; None: blocks of 32."""
        self.name, self.bits, self.zero, self.part = name, bits, zero or 0, part
        self.scale_parts = ("least", "scales") if zero is None else ("scales",)
        self.groups = () if part else (32,)

    @property
    def minima(self) -> bool:
        return "least" in self.scale_parts

    def sizes(self, width: int, group: int | None) -> tuple[int, int]:
        """Values of a block and of a sub-block, in rows of `width` values."""
        if self.part is None:
            return group or width, group or width
        return (SUPER, self.part) if width % SUPER == 0 else (width, width)

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        block, part = self.sizes(width, args.group)
        return self.bits + (16 / block + (8 / part if self.part else 0)) * len(self.scale_parts)

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        block, part = self.sizes(weight.shape[1], args.group)
        x, top = grouped(weight, part), (1 << self.bits) - 1
        low, high = x.aminmax(dim=-1)  # [O, parts]
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        if self.minima:
            scales, steps = self._levels(over(high, top) - over(low, top), block // part, 63)
            least, minima = self._levels(-low, block // part, 63)
            unit = product(scales, steps)
            codes = divided(x, unit).add_(divided(product(least, minima)[..., None], unit)).round_()
            more = {"steps": steps, "least": least, "minima": minima}
        else:
            scales, steps = self._levels(over(torch.maximum(high, -low), top - self.zero), block // part, 127)
            codes = divided(x, product(scales, steps)).round_().add_(self.zero)
            more = {"steps": steps}
        q = self.stored(codes.clamp_(0, top).to(torch.uint8), scales)
        return replace(q, parts={**q.parts, **{name: t for name, t in more.items() if t is not None}})

    def _levels(self, size: Tensor, per_block: int, most: int) -> tuple[Tensor, Tensor | None]:
        """Express `size` [O, parts] as bf16 scales of `per_block` parts, and int8 multiples 0..most if there are steps.

        The largest size of a block gets the multiple `most`; NaN or infinity makes the scale NaN.
        """
        if self.part is None:
            return bf16_scales(size, 1.0), None
        blocks = size.view(len(size), size.shape[1] // per_block, per_block)
        scales = bf16_scales(blocks.amax(-1), most)
        return scales, divided(blocks, scales).round_().clamp_(0, most).to(torch.int8).flatten(1)

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return codes.bitwise_and((1 << self.bits) - 1).float().sub_(self.zero)

    def decode(self, q: QuantTensor) -> Tensor:
        """The stored values, float32 [O, K], bit for bit those of the gguf package."""
        parts = plain(q).parts
        unit = product(parts["scales"], parts.get("steps"))
        codes = parts["codes"].view(*unit.shape, q.shape[1] // unit.shape[1])
        found = self.values(codes, None).mul_(unit[..., None])
        if self.minima:
            found.sub_(product(parts["least"], parts.get("minima"))[..., None])
        return found.flatten(1)


def product(scales: Tensor, steps: Tensor | None) -> Tensor:
    """scales [O, n] times steps [O, parts], float32 [O, parts]; the scales themselves without steps."""
    if steps is None:
        return scales.float()
    return (scales.float()[..., None] * steps.view(*scales.shape, steps.shape[1] // scales.shape[1]).float()).flatten(1)
