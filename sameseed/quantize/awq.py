"""Quantizer awq: scale up the weights of channels whose inputs are large, as far as the output error falls.

Lin et al. (2023), "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sameseed.fields import within
from sameseed.models.config import ModelConfig
from sameseed.quantize import Quantizer, SchemeOf, Stats, decoded, is_dense
from sameseed.quantize._decoder import NORM_OF, STAGES, UP, Block, V
from sameseed.quantize._grid import clip
from sameseed.quantize.smooth import fold_into_norm, powers_of_two
from sameseed.scheme import QuantScheme, QuantTensor


class Awq(Quantizer):
    """Scales are folded into the preceding weights: a norm, the value heads (for o) or the rows of up (for down)."""

    needs = frozenset({"hessian"})
    rounds = True

    @dataclass(frozen=True)
    class Options(Quantizer.Options):
        """`grid`: search steps from no scaling to the inputs' size, each with and without the weights' share.

        `clip`: also search each group's clipping range.
        """

        grid: int = within(10, 1)
        clip: bool = True

    def prepare(self, block: Block, stats: Mapping[str, Stats], config: ModelConfig, scheme_of: SchemeOf) -> None:
        for stage in STAGES:
            choices = [(block.linears[n].weight, scheme_of(n)) for n in STAGES[stage]]
            choices = [(w, s) for w, s in choices if not is_dense(s)]
            if not choices:
                continue
            shared = config.num_heads // config.num_kv_heads if stage == "o" else 1
            taking = {"o": (V,), "down": (UP,)}.get(stage, STAGES[stage])  # these absorb the scales
            fit = powers_of_two if any(is_dense(scheme_of(n)) for n in taking) else torch.clone
            scales = self._search(choices, stats[stage], fit, shared, config.head_dim)
            if stage in NORM_OF:
                fold_into_norm(block, stage, scales)
            else:
                # The writer's outputs (rows of v or up) are divided by scales [K], the reader's columns multiplied.
                rows = scales.view(-1, shared, config.head_dim)[:, 0].flatten() if stage == "o" else scales
                writer, reader = block.linears[taking[0]], block.linears[STAGES[stage][0]]
                writer.weight = writer.weight / rows[:, None]
                if writer.bias is not None:
                    writer.bias = writer.bias / rows
                reader.weight = reader.weight * scales

    def _search(
        self,
        choices: list[tuple[Tensor, QuantScheme]],
        stats: Stats,
        fit: Callable[[Tensor], Tensor],
        shared: int,
        dim: int,
    ) -> Tensor:
        """The scales [K] of least output error: powers of the inputs' mean size, with and without the weights' share.

        `fit` rounds scales to values that may be folded (powers of two for dense weights).
        """
        width = len(stats.mean_abs)
        inputs = _shared(stats.mean_abs.clamp(min=1e-8), shared, dim)
        # |w| relative to the largest of its row: the share of the quantization steps that a channel uses.
        sizes = [w.abs() for w, _ in choices]
        weights = torch.stack([(s / s.amax(1, keepdim=True).clamp(min=1e-30)).mean(0) for s in sizes]).mean(0)
        weights = _shared(weights.clamp(min=1e-8), shared, dim)
        found = torch.ones(width, device=inputs.device)
        best = _error(choices, found, stats)
        for step in range(1, self.options.grid + 1):
            alpha = step / self.options.grid
            for beta in (0.0, 1.0 - alpha):
                scales = inputs.pow(alpha) / weights.pow(beta)
                scales = fit((scales / (scales.max() * scales.min()).sqrt()).clamp(1e-4, 1e4))
                error = _error(choices, scales, stats)
                if error < best:
                    best, found = error, scales
        return found

    def quantize(self, weight: Tensor, scheme: QuantScheme, stats: Stats | None) -> QuantTensor:
        assert stats is not None  # a run without calibration text is refused before
        return scheme.encode(clip(weight, scheme.encode, stats.hessian) if self.options.clip else weight)


def _shared(values: Tensor, shared: int, dim: int) -> Tensor:
    """values [K] averaged over the query heads that read one value head."""
    if shared == 1:
        return values
    heads = values.view(-1, shared, dim)
    return heads.mean(1, keepdim=True).expand_as(heads).flatten()


def _error(choices: list[tuple[Tensor, QuantScheme]], scales: Tensor, stats: Stats) -> float:
    """Output error of weights [O, K] stored with their columns multiplied by scales [K]."""
    return sum(float(stats.error(w, decoded(s.encode(w * scales)) / scales).sum()) for w, s in choices)


METHOD = Awq
