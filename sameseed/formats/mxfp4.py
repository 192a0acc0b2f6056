"""Format mxfp4: 4-bit floats e2m1 under a power of two for each 32 weights (OCP Microscaling Formats 1.0, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.formats._coded import Coded, compressed_tensors, grouped, packed_bytes
from sameseed.scheme import SMALLEST, QuantArgs, QuantTensor, plain

# e2m1: sign, two bits of exponent, one of mantissa.
TABLE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# The middles between values. Ties go to the even code, so every second border lies just below its middle.
_HALFWAY = (TABLE[1:8] + TABLE[:7]) / 2
BORDERS = torch.where(torch.arange(7) % 2 == 0, _HALFWAY, _HALFWAY.nextafter(torch.zeros(())))
BLOCK = 32
SMALLEST_SCALE = 2.0**-127  # e8m0 cannot represent 0, so blocks of zeros get this scale


class MXFP4(Coded):
    """Codes 0..15 are the bits of e2m1; value = TABLE[code] * scale, where the scale is a power of two as bfloat16.

    scale = 2^(floor(log2 absmax) - 2), as the specification says. So absmax lies below 8 scales, and values beyond 6
    scales are clamped to 6. The error is at most half a step, or 2 scales where a value is clamped. `-mse` doubles the
    scale where that lowers the squared error of the block. NaN in a block makes its scale NaN (e8m0 255). A checkpoint
    has one byte per scale (4.25 bits).
    """

    name = "mxfp4"
    bits = 4
    options = frozenset({"mse", "activations"})
    groups = (BLOCK,)

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        x = grouped(weight, args.group)
        a = x.abs().amax(-1)
        usable = a.isfinite() & (a >= SMALLEST)
        exponents = torch.frexp(torch.where(usable, a, 1.0)).exponent - 3  # frexp: a = m * 2^e, m in [0.5, 1)
        scales = torch.ldexp(torch.ones_like(a), exponents)  # [O, K / G]
        codes, error = _round(x, scales)
        if args.variant == "mse":
            wider, wider_error = _round(x, scales * 2)
            better = wider_error < error
            codes = torch.where(better[..., None], wider, codes)
            scales = torch.where(better, scales * 2, scales)
        codes.masked_fill_(~usable[..., None], 0)
        scales = torch.where(usable, scales, torch.where(a.isfinite(), SMALLEST_SCALE, torch.nan))
        return self.stored(codes, scales.to(torch.bfloat16))

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return TABLE.to(codes.device)[codes.long()]

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Tensors in compressed-tensors' mxfp4-pack-quantized layout: two codes per byte, the first in its low half.

        Raises ConfigError for rows whose width is not a multiple of 32, because no reader supports them.
        """
        codes = plain(q).parts["codes"]
        if q.group != BLOCK:
            raise ConfigError(
                f"tensor {name} has rows of {q.shape[1]}, no multiple of 32: mxfp4 is stored in blocks of 32"
            )
        return {
            f"{name}.weight_packed": packed_bytes(codes, 4),
            f"{name}.weight_scale": to_e8m0(q.parts["scales"]),
        }

    def config(self, q: QuantTensor) -> dict[str, object]:
        return compressed_tensors(
            "mxfp4-pack-quantized", q, 4, "float", scale_dtype="torch.uint8", zp_dtype="torch.uint8"
        )


def _round(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of x [O, K / G, G] under scales [O, K / G], ties to even, and the squared error of each block."""
    steps = x / scales[..., None]  # exact: a power of two
    size = torch.bucketize(steps.abs(), BORDERS.to(x.device)).to(torch.uint8)
    codes = size | ((steps < 0) & (size > 0)).to(torch.uint8) << 3
    return codes, (TABLE.to(x.device)[codes.long()] - steps).mul_(scales[..., None]).square_().sum(-1)


def to_e8m0(scales: Tensor) -> Tensor:
    """Powers of two in bfloat16 (2^-127 to 2^127, or NaN) as their exponents + 127; NaN is 255."""
    bits = scales.contiguous().view(torch.int16).int()
    return torch.where(scales.isnan(), 255, bits >> 7).to(torch.uint8)


FORMAT = MXFP4()
