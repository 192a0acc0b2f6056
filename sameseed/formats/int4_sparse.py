"""Format int4_sparse: the KV cache dense and sparse: a row's largest values kept apart, the rest in 4 bits (KVQuant).

After Hooper et al., 2024 (KVQuant), but with scales per token and head, so the stored bytes of a token depend on that
token alone.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.formats import _kv4
from sameseed.scheme import Format

NAME = "int4_sparse"
LARGEST = torch.finfo(torch.bfloat16).max


def num_outliers(dim: int) -> int:
    """The number of outliers that are stored separately in a row of `dim` values: one per 32, at least one."""
    return max(1, dim // 32)


def _index_bytes(dim: int) -> int:
    return 1 if dim <= 256 else 2


@cache
def _dim(width: int) -> int:
    """D of rows that take `width` bytes: the inverse of D / 2 + 2 + n (2 + bytes per index), which grows with D.

    Raises ConfigError where no D fits.
    """
    dim = 2
    while (found := dim // 2 + _kv4.LOWEST_BYTES + num_outliers(dim) * (2 + _index_bytes(dim))) < width:
        dim += 2
    if found != width:
        raise ConfigError(f"rows of {width} bytes hold no row of a cache in {NAME!r}; it was made by another version")
    return dim


class Int4Sparse(Format):
    """For the KV cache only. A row (even D) holds the `_kv4` bytes of the small values, then the n outliers.

    The outliers are the n values of largest magnitude (the first one on a tie). They are stored as bfloat16 (2 n
    bytes), then their indices, ascending (n bytes, or 2 n little-endian where D > 256). |error| <= scale / 2 for small
    values, and 2^-8 of the value for outliers.
    """

    name = NAME
    bits = 4
    weights = False
    kv_dtype = torch.uint8

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Bytes uint8 [T, Hk, W] and scales float32 [T, Hk] of x [T, Hk, D]. Raises ConfigError for an odd D."""
        dim = _kv4.even(NAME, x.shape[-1])
        x = x.float()
        # A stable sort: the order of equal values must not depend on the other rows that are sorted in this call.
        order = x.abs().sort(dim=-1, descending=True, stable=True).indices
        index = order[..., : num_outliers(dim)].sort(-1).values  # [T, Hk, n]
        kept = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, index, True)
        data, scales = _kv4.encode_rows(x, kept)
        outliers = x.gather(-1, index).clamp(-LARGEST, LARGEST).to(torch.bfloat16)
        places = [index & 255] if _index_bytes(dim) == 1 else [torch.stack([index & 255, index >> 8], -1).flatten(-2)]
        return torch.cat([data, _kv4.as_bytes(outliers), *(p.to(torch.uint8) for p in places)], -1), scales

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        dim = _dim(codes.shape[-1])
        count, start = num_outliers(dim), dim // 2 + _kv4.LOWEST_BYTES
        outliers = _kv4.as_bf16(codes[..., start : start + 2 * count]).float()
        places = codes[..., start + 2 * count :].long()
        if _index_bytes(dim) == 2:
            places = places[..., ::2] | places[..., 1::2] << 8
        places = places.clamp_(max=dim - 1)  # rows that were never written may hold anything
        return _kv4.decode_rows(codes, scales, dim).scatter_(-1, places, outliers)


FORMAT = Int4Sparse()
