"""Orthogonal matrices whose entries are all small: products with them spread an outlier over every channel.

A power of two 2^k takes the Hadamard matrix; n = m * 2^k its Kronecker product with the Hartley matrix of the odd m
(entries cos + sin, at most sqrt(2 / m)). Both are symmetric and their own inverse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sameseed.formats._hadamard import hadamard


def hartley(size: int) -> Tensor:
    """The orthogonal Hartley matrix float64 [n, n]: cos + sin of 2 pi i j / n, over sqrt(n)."""
    angle = 2 * math.pi / size * (torch.arange(size)[:, None] * torch.arange(size)[None, :] % size).double()
    return (angle.cos() + angle.sin()) / math.sqrt(size)


def spread(x: Tensor) -> Tensor:
    """x [..., n] times the orthogonal matrix of that size, float32."""
    out = hadamard(x)  # in blocks of the largest power of two
    power = x.shape[-1] & -x.shape[-1]
    if power == x.shape[-1]:
        return out
    blocks = out.view(*x.shape[:-1], -1, power)
    mixed: Tensor = hartley(blocks.shape[-2]).float().to(x.device) @ blocks
    return mixed.flatten(-2)


def signs(size: int, seed: int) -> Tensor:
    """Random signs float32 [n]: the same seed, the same signs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1


def rotate_rows(x: Tensor, seed: int) -> Tensor:
    """Rows x [..., C] times the randomized matrix Q (signs, then `spread`), float32."""
    return spread(x.float() * signs(x.shape[-1], seed).to(x.device))


def rotate_columns(weight: Tensor, seed: int) -> Tensor:
    """Q transposed times weight [C, K]: outputs of the product are rotated as `rotate_rows` rotates rows."""
    return rotate_rows(weight.T, seed).T.contiguous()
