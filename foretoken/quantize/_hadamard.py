"""Orthogonal matrices whose entries are all small: products with them spread an outlier over every channel.

A power of two 2^k takes the Hadamard matrix; n = m * 2^k its Kronecker product with the Hartley matrix of the odd m
(entries cos + sin, at most sqrt(2 / m)). Both are symmetric and their own inverse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hartley(size: int) -> Tensor:
    """The orthogonal Hartley matrix float64 [n, n]: cos + sin of 2 pi i j / n, over sqrt(n)."""
    angle = 2 * math.pi / size * (torch.arange(size)[:, None] * torch.arange(size)[None, :] % size).double()
    return (angle.cos() + angle.sin()) / math.sqrt(size)


def spread(x: Tensor) -> Tensor:
    """x [..., n] times the orthogonal matrix of that size, float64."""
    size = x.shape[-1]
    odd = size // (size & -size)
    out = x.double().reshape(*x.shape[:-1], size // odd, odd)
    if odd > 1:
        out = out @ hartley(odd)
    span = 1
    while span < size // odd:  # the fast Hadamard transform, along the second last dimension
        pairs = out.view(*x.shape[:-1], -1, 2, span, odd)
        low, high = pairs[..., 0, :, :], pairs[..., 1, :, :]
        out = torch.stack([low + high, low - high], dim=-3).view(*x.shape[:-1], size // odd, odd)
        span *= 2
    return out.flatten(-2) / math.sqrt(size // odd)


def signs(size: int, seed: int) -> Tensor:
    """Random signs float64 [n]: the same seed, the same signs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1


def rotate_rows(x: Tensor, seed: int) -> Tensor:
    """Rows x [..., C] times the randomized matrix Q (signs, then `spread`), in x's type."""
    return spread(x.double() * signs(x.shape[-1], seed)).to(x.dtype)


def rotate_columns(weight: Tensor, seed: int) -> Tensor:
    """Q transposed times weight [C, K]: outputs of the product are rotated as `rotate_rows` rotates rows."""
    return rotate_rows(weight.T, seed).T.contiguous()
