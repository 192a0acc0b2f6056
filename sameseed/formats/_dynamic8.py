"""8-bit codes with a dynamic exponent, in blocks of 256 (Dettmers, 2016 and 2022): nf4-dq stores its scales in them."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256


def _table() -> Tensor:
    """The 256 code values in [-1, 1], float32, ascending.

    They are 0, 1 and, for i in 0..6 and both signs, 10^-i times the middles of 2^(6 - i) equal parts of [0.1, 1].
    -1 is not among them.
    """
    values = [0.0, 1.0]
    for zeros in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (6 - zeros) + 1)
        middles = (10.0**-zeros * ((ends[:-1] + ends[1:]) / 2)).tolist()
        values += middles + [-m for m in middles]
    return torch.tensor(sorted(values))


TABLE = _table()
BORDERS = (TABLE[1:] + TABLE[:-1]) / 2


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [n] of x [n], and the absmax float32 [n / 256] (rounded up) of each block."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[0] % BLOCK)).view(-1, BLOCK)
    sizes = padded.abs().amax(-1)
    steps = padded / torch.where(sizes > 0, sizes, 1.0)[:, None]
    codes = torch.bucketize(steps, BORDERS.to(x.device)).to(torch.uint8)
    return codes.flatten()[: x.shape[0]], sizes


def decode(codes: Tensor, sizes: Tensor) -> Tensor:
    """The inverse of `encode`, float32 [n]."""
    return TABLE.to(codes.device)[codes.long()] * sizes.repeat_interleave(BLOCK)[: codes.shape[0]]
