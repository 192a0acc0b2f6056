"""KV cache rows in 4 bits (even D): packed codes, the row's lowest value, and then what a format adds.

The row of a token and head takes W bytes: D / 2 bytes of codes 0..15 (the low nibble of byte i is value i, the high one
value i + D / 2), then the row's lowest value as bfloat16 (little-endian, rounded down). value = code * scale + lowest;
the float32 scale is in a tensor of its own. A row with NaN or infinity gets the scale NaN; a row whose values are all
smaller than 2^-100 becomes zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.scheme import SMALLEST, over

LOWEST_BYTES = 2


def even(name: str, dim: int) -> int:
    """Return `dim`. Raises ConfigError if `dim` is odd, since two values share a byte."""
    if dim % 2:
        raise ConfigError(f"a KV cache in {name!r} needs an even head dimension, not {dim}; use 'int8' or 'bf16'")
    return dim


def encode_rows(x: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bytes uint8 [..., D / 2 + 2] and scales float32 [...] of x [..., D]; |error| <= scale / 2, up to rounding.

    Values where `kept` is true are ignored (their code is 0), because the caller stores them elsewhere.
    """
    x = x.float()
    counted = x if kept is None else torch.where(kept, torch.nan, x)
    high = counted.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(-1, keepdim=True)
    bits = counted.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(-1, keepdim=True).view(torch.int32)
    # Rounded towards minus infinity to a bfloat16 value, so that codes are never negative.
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
    """Decode x float32 [..., D] from scales [...] and bytes that begin with the output of `encode_rows`."""
    nibbles = data[..., : dim // 2]
    lowest = as_bf16(data[..., dim // 2 : dim // 2 + LOWEST_BYTES]).float()  # [..., 1]
    return torch.cat([nibbles & 15, nibbles >> 4], -1).float() * scales[..., None] + lowest


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def as_bf16(data: Tensor) -> Tensor:
    # Copied to new memory: a slice of a row may begin at an odd address, and bfloat16 needs an even one.
    return data.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
