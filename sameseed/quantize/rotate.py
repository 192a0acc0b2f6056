"""Quantizer rotate: turn the residual stream and the value heads so that no channel stands out.

Ashkboos et al. (2024), "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs". Norms are folded into the weights that
follow, then every matrix that reads or writes the stream takes a randomized Hadamard rotation. The rotations that
QuaRot makes while running are left out: what comes out is a plain checkpoint of the same family.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sameseed.models.config import ModelConfig
from sameseed.quantize import Quantizer, SchemeOf, Stats
from sameseed.quantize._decoder import DOWN, NORM_OF, STAGES, Block, O, V
from sameseed.quantize._hadamard import rotate_columns, rotate_rows, spread


class Rotate(Quantizer):
    """With tied embeddings the head becomes a matrix of its own: only it takes the last norm."""

    first = True
    turns = True
    unties = True

    def prepare(self, block: Block, stats: Mapping[str, Stats], config: ModelConfig, scheme_of: SchemeOf) -> None:
        for stage, norm in NORM_OF.items():
            for name in STAGES[stage]:
                linear = block.linears[name]
                linear.weight = rotate_rows(linear.weight * block.norms[norm], self.seed)
            block.norms[norm] = torch.ones_like(block.norms[norm])
        self._turn_values(block, config)
        for name in (O, DOWN):
            linear = block.linears[name]
            linear.weight = rotate_columns(linear.weight, self.seed)
            if linear.bias is not None:
                linear.bias = rotate_rows(linear.bias, self.seed)

    def _turn_values(self, block: Block, config: ModelConfig) -> None:
        """Each value head is turned, and turned back in what reads it: attention mixes tokens, not channels."""
        v, o = block.linears[V], block.linears[O]
        dim = config.head_dim
        v.weight = spread(v.weight.T.reshape(-1, config.num_kv_heads, dim)).flatten(1).T.contiguous()
        if v.bias is not None:
            v.bias = spread(v.bias.view(-1, dim)).flatten()
        o.weight = spread(o.weight.view(len(o.weight), -1, dim)).flatten(1)

    def embedding(self, rows: Tensor) -> Tensor:
        return rotate_rows(rows, self.seed)

    def head(self, rows: Tensor, norm: Tensor) -> Tensor:
        return rotate_rows(rows * norm, self.seed)

    def last_norm(self, norm: Tensor) -> Tensor:
        return torch.ones_like(norm)


METHOD = Rotate
