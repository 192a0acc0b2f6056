"""Format qoq: int4 codes under int8 group scales inside one scale per channel (QoQ and QServe: Lin et al., 2024)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sameseed.formats._coded import Coded, bf16_scales, divided, grouped
from sameseed.scheme import QuantArgs, QuantTensor

# Codes of the first level reach 119, not 127 (the paper's protective range): rounding to steps of up to 16 (238 / 15,
# rounded up) moves a code by at most 8, so (code - zero) * step stays within int8.
PROTECTED = 119


class QoQ(Coded):
    """Two levels: an int8 weight w8 = round(w / channel), and 4-bit codes of w8 by group: w8 ~ (code - zero) * step.

    channel = absmax / 119 of the row, bfloat16. step = the range of w8 in the group, extended to contain 0, divided by
    15 and rounded up: an integer in 1..16 (0 for a group of zeros). zero lies in 0..15. (code - zero) * step lies in
    -127..127 for every weight, so a kernel may multiply in int8.

    Parts: "codes", "zeros", "channel" [O, 1], and "scales" float32 [O, K / G] = step * channel, which is exact (8 bits
    times 5). The value is (code - zero) * scale, which the int4 kernels compute: with float rows one fma per weight,
    with int8 rows the exact sum of (code - zero) * x over a group, times scale. |error| <= (step + 1) / 2 * channel.

    `-mse` takes the next smaller step where that lowers the squared error of the group, although it clips the range.
    """

    name = "qoq"
    bits = 4
    options = frozenset({"group", "activations", "mse"})
    groups = (128, 64, 32)

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        x = grouped(weight, args.group)
        channel = bf16_scales(x.abs().amax((1, 2)), PROTECTED)[:, None]  # [O, 1]
        w8 = divided(x, channel.expand(-1, x.shape[1])).round_().clamp_(-PROTECTED, PROTECTED)  # [O, K / G, G]
        low, high = w8.aminmax(dim=-1)
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        steps = ((high - low) / 15).ceil_()  # rounded up: no value is cut off
        codes, zeros, error = _second(w8, low, steps)
        if args.variant == "mse":
            smaller = (steps - 1).clamp_(min=1.0)
            other_codes, other_zeros, other_error = _second(w8, low, smaller)
            better = other_error < error
            codes, zeros = torch.where(better, other_codes, codes), torch.where(better, other_zeros, zeros)
            steps = torch.where(better.squeeze(-1), smaller, steps)
        zeros = zeros.squeeze(-1).to(torch.uint8).contiguous()
        q = self.stored(codes.to(torch.uint8), steps.float() * channel.float(), zeros)
        return replace(q, parts={**q.parts, "channel": channel.contiguous()})

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        """Bits in memory, where a group has a float32 scale (its step alone would take one byte)."""
        return 4 + (32 + 8) / (args.group or width) + 16 / width

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        assert zeros is not None
        return codes.float() - zeros.float()


def _second(w8: Tensor, low: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of w8 [O, K / G, G] for integer steps [O, K / G]; zeros (from low) and squared error [O, K / G, 1]."""
    zeros = divided(-low[..., None], steps).round_().clamp_(0, 15)
    codes = divided(w8, steps).round_().add_(zeros).clamp_(0, 15)
    return codes, zeros, ((codes - zeros) * steps[..., None] - w8).square_().sum(-1, keepdim=True)


FORMAT = QoQ()
