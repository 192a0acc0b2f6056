"""Format int8n: 8-bit integers that hold a 4-bit weight of the same groups in their upper halves."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sameseed.formats._coded import Coded, bf16_scales, divided, grouped
from sameseed.scheme import QuantArgs, QuantTensor, over, plain

LOWEST, HIGHEST = -128, 119


class Int8n(Coded):
    """Codes q in -128..119; the scale of a group is the larger of max / 119 and -min / 128, bfloat16.

    Every code splits into q = 16 high + low, both in -8..7, where high = round(q / 16). So `high` with the scale 16 s
    is a symmetric int4 weight in the same groups, at most half an int4 step (plus half a step of q) off: see `lower`. A
    backend may store the two halves as separate planes. Then drafting reads only the upper plane, and verification
    reads both.

    Parts: "codes" int8 and "scales". The 4-bit view has "high" (codes of which only the upper half counts) instead of
    "codes".
    """

    name = "int8n"
    bits = 8
    codes = range(LOWEST, HIGHEST + 1)
    options = frozenset({"group", "activations"})
    groups = (128, 64, 32)
    nests = "int8"

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        x = grouped(weight, args.group)
        low, high = x.aminmax(dim=-1)  # [O, K / G]
        scales = bf16_scales(torch.maximum(over(high, HIGHEST), over(low, LOWEST)), 1.0)
        return self.stored(divided(x, scales).round_().clamp_(LOWEST, HIGHEST).to(torch.int8), scales)

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return codes.float()

    def lower(self, q: QuantTensor) -> QuantTensor | None:
        """The 4-bit view of the upper halves, or None where a backend packed whole bytes (for float activations)."""
        name = "codes" if q.layout == "plain" and "codes" in q.parts else "high"
        if name not in q.parts:
            return None
        return replace(q, parts={"high": q.parts[name], "scales": q.parts["scales"]})

    def decode(self, q: QuantTensor) -> Tensor:
        """The stored values, float32 [O, K]; for a 4-bit view, the values of the upper halves."""
        parts = plain(q).parts
        if "high" not in parts:
            return super().decode(q)
        return super().decode(replace(q, parts={"codes": 16 * high(parts["high"]), "scales": parts["scales"]}))


def high(codes: Tensor) -> Tensor:
    """The rounded upper halves of int8 codes q: round(q / 16), in -8..7."""
    return (codes.to(torch.int16) + 8 >> 4).to(torch.int8)


FORMAT = Int8n()
