"""Quantizer smooth: move the outliers of a norm's output into the weights that read it.

Xiao et al. (2023), "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sameseed.fields import within
from sameseed.models.config import ModelConfig
from sameseed.quantize import Quantizer, SchemeOf, Stats, is_dense
from sameseed.quantize._decoder import NORM_OF, STAGES, Block


class Smooth(Quantizer):
    """Divide channel j of x by s_j = max|x_j|^alpha / max|w_j|^(1 - alpha), and multiply the weights by s_j."""

    needs = frozenset({"hessian"})

    @dataclass(frozen=True)
    class Options(Quantizer.Options):
        """`alpha`: 0 leaves all outliers in the activations, 1 moves all into the weights."""

        alpha: float = within(0.5, 0, 1)

    def prepare(self, block: Block, stats: Mapping[str, Stats], config: ModelConfig, scheme_of: SchemeOf) -> None:
        for stage in NORM_OF:
            dense = [is_dense(scheme_of(name)) for name in STAGES[stage]]
            if all(dense):
                continue
            weights = torch.cat([block.linears[n].weight for n in STAGES[stage]]).abs().amax(0)
            inputs, alpha = stats[stage].absmax, self.options.alpha
            scales = inputs.pow(alpha) / weights.pow(1 - alpha)
            usable = (inputs > 0) & (weights > 0) & scales.isfinite()
            scales = torch.where(usable, scales, 1.0).clamp_(1e-5, 1e5)
            fold_into_norm(block, stage, powers_of_two(scales) if any(dense) else scales)


def powers_of_two(scales: Tensor) -> Tensor:
    """Scales rounded to powers of two, which multiply a weight stored as floats without new rounding errors."""
    return scales.log2().round().exp2()


def fold_into_norm(block: Block, stage: str, scales: Tensor) -> None:
    """Divide a norm's output by scales [C], and multiply the weights that read it by them."""
    block.norms[NORM_OF[stage]] = block.norms[NORM_OF[stage]] / scales
    for name in STAGES[stage]:
        block.linears[name].weight = block.linears[name].weight * scales


METHOD = Smooth
