"""Quantizer rotate: rotate the residual stream and the value heads so that no channel is an outlier.

Ashkboos et al. (2024), "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs". Norms are folded into the weights that
follow, then every matrix that reads or writes the stream is multiplied by a randomized Hadamard rotation. QuaRot's
rotations at run time are left out, so the result is a plain checkpoint of the same model family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sameseed.formats._hadamard import hadamard
from sameseed.models.config import ModelConfig
from sameseed.quantize import Quantizer, SchemeOf, Stats
from sameseed.quantize._decoder import DOWN, NORM_OF, STAGES, Block, O, V


class Rotate(Quantizer):
    """Tied embeddings are untied, because the last norm is folded into the LM head but not into the embedding."""

    rotates = True

    def prepare(self, block: Block, stats: Mapping[str, Stats], config: ModelConfig, scheme_of: SchemeOf) -> None:
        for stage, norm in NORM_OF.items():
            for name in STAGES[stage]:
                linear = block.linears[name]
                linear.weight = rotate_rows(linear.weight * block.norms[norm], self.seed)
            block.norms[norm] = torch.ones_like(block.norms[norm])
        # Each value head is rotated, and o_proj rotates it back: attention mixes tokens, not channels.
        v, o, dim = block.linears[V], block.linears[O], config.head_dim
        v.weight = spread(v.weight.T.reshape(-1, config.num_kv_heads, dim)).flatten(1).T.contiguous()
        if v.bias is not None:
            v.bias = spread(v.bias.view(-1, dim)).flatten()
        o.weight = spread(o.weight.view(len(o.weight), -1, dim)).flatten(1)
        for name in (O, DOWN):
            linear = block.linears[name]
            linear.weight = rotate_rows(linear.weight.T, self.seed).T.contiguous()
            if linear.bias is not None:
                linear.bias = rotate_rows(linear.bias, self.seed)

    def embedding(self, rows: Tensor) -> Tensor:
        return rotate_rows(rows, self.seed)

    def head(self, rows: Tensor, norm: Tensor) -> Tensor:
        return rotate_rows(rows * norm, self.seed)

    def last_norm(self, norm: Tensor) -> Tensor:
        return torch.ones_like(norm)


def spread(x: Tensor) -> Tensor:
    """x [..., n] times an orthogonal matrix whose entries are all small, float32.

    For n = 2^k this is the Hadamard matrix. For n = m * 2^k it is the Kronecker product of the Hadamard matrix of 2^k
    and the Hartley matrix of the odd m (entries cos + sin, at most sqrt(2 / m)). Both are symmetric and their own
    inverse.
    """
    out = hadamard(x)  # in blocks of the largest power of two
    power = x.shape[-1] & -x.shape[-1]
    if power == x.shape[-1]:
        return out
    blocks = out.view(*x.shape[:-1], -1, power)
    odd = blocks.shape[-2]
    angle = 2 * math.pi / odd * (torch.arange(odd)[:, None] * torch.arange(odd)[None, :] % odd).double()
    hartley = (angle.cos() + angle.sin()) / math.sqrt(odd)
    mixed: Tensor = hartley.float().to(x.device) @ blocks
    return mixed.flatten(-2)


def rotate_rows(x: Tensor, seed: int) -> Tensor:
    """Rows x [..., C] times the randomized matrix Q (signs, then `spread`), float32."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (x.shape[-1],), generator=generator).float() * 2 - 1
    return spread(x.float() * signs.to(x.device))


METHOD = Rotate
