"""Rows of the cache in 4 bits, of even D: nibbles, the smallest value, and what a format adds behind them.

A row and head is W bytes: D / 2 of codes 0..15 (the low nibble of byte i is value i, the high one value i + D / 2),
then the row's lowest value as bfloat16 (little-endian, rounded down). value = code * scale + lowest, the scale float32
beside the codes. Rows that hold NaN or infinity have the scale NaN; those below 2^-100 are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.scheme import SMALLEST, over

LOWEST_BYTES = 2


def even(name: str, dim: int) -> int:
    """`dim`. Raises ConfigError unless it is even: two values share a byte."""
    if dim % 2:
        raise ConfigError(f"a KV cache in {name!r} needs an even head dimension, not {dim}; use 'int8' or 'bf16'")
    return dim


def encode_rows(x: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bytes uint8 [..., D / 2 + 2] and scales float32 [...] of x [..., D]; |error| <= scale / 2, up to rounding.

    Values where `kept` is true count for nothing (their code is 0): they are stored elsewhere.
    """
    x = x.float()
    counted = x if kept is None else torch.where(kept, torch.nan, x)
    high = counted.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(-1, keepdim=True)
    bits = counted.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(-1, keepdim=True).view(torch.int32)
    # Rounded towards minus infinity to what bfloat16 holds: codes are never negative then.
    lowest = torch.where(bits < 0, bits + 0xFFFF, bits).bitwise_and(-0x10000).view(torch.float32)
    broken = ~(x.isfinite().all(-1, keepdim=True) & lowest.isfinite() & (high - lowest).isfinite())
    empty = torch.maximum(high.abs(), lowest.abs()) < SMALLEST
    lowest = torch.where(broken | empty, 0.0, lowest)
    span = torch.where(broken | empty, 0.0, high - lowest)
    usable = span >= SMALLEST
    inverse = torch.full_like(span, 15.0) / torch.where(usable, span, 15.0)
    steps = (torch.where(broken, 0.0, x) - lowest) * inverse
    codes = torch.where(usable, steps.nan_to_num_(0.0).round_().clamp_(0, 15), 0.0)
    codes = (codes if kept is None else codes.masked_fill_(kept, 0.0)).to(torch.uint8)
    scales = torch.where(usable, over(span, 15.0), 0.0).masked_fill_(broken, torch.nan)
    half = x.shape[-1] // 2
    nibbles = codes[..., :half] | codes[..., half:] << 4
    return torch.cat([nibbles, as_bytes(lowest.to(torch.bfloat16))], -1), scales.squeeze(-1)


def decode_rows(data: Tensor, scales: Tensor, dim: int) -> Tensor:
    """x float32 [..., D] of bytes that begin as `encode_rows` makes them, and scales [...]."""
    nibbles = data[..., : dim // 2]
    lowest = as_bf16(data[..., dim // 2 : dim // 2 + LOWEST_BYTES]).float()  # [..., 1]
    return torch.cat([nibbles & 15, nibbles >> 4], -1).float() * scales[..., None] + lowest


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def as_bf16(data: Tensor) -> Tensor:
    # Fresh memory: a slice of a row begins where it begins, two bytes of a number at an even address.
    return data.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
