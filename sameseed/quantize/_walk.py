"""Quantize a model layer by layer: prepare a layer, choose its codes, pass the hidden states through it.

Memory holds one layer in float32, the statistics of one product, and the hidden states of the calibration rows. While a
method that needs statistics rewrites a layer, memory holds those of its four stages. The hidden states lie in CPU
memory; the computing device gets them in chunks, and holds everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sameseed.models.config import ModelConfig
from sameseed.models.weights import TensorSource, resolve_scheme
from sameseed.quantize import Pipeline, Quantizer, Stats, decoded, is_dense
from sameseed.quantize._decoder import (
    CPU,
    DOWN,
    NORM_OF,
    STAGES,
    UP,
    Block,
    DecoderLayers,
    O,
    V,
    chunks,
    moved,
    read_block,
)
from sameseed.scheme import QuantScheme, QuantTensor


@dataclass(frozen=True)
class ModuleError:
    """The error of storing one matrix. `relative`: RMS change of its output, divided by the RMS of the output.

    `output`: the mean squared change, trace(dW H dW^T) / O. Without calibration both are of the weights (H = 1).
    """

    module: str
    scheme: str
    bits: float
    num_weights: int
    relative: float
    output: float


def module_error(module: str, scheme: QuantScheme, before: Tensor, after: Tensor, stats: Stats | None) -> ModuleError:
    """The error of storing matrix `before` [O, K] with the values `after`."""
    if stats is None:
        lost, whole = (after - before).square().sum(1), before.square().sum(1)
    else:
        lost, whole = stats.error(before, after), stats.error(before, torch.zeros_like(before))
    relative = float((lost.sum() / whole.sum().clamp(min=1e-30)).sqrt())
    bits = scheme.bits_per_weight(before.shape[1])
    return ModuleError(module, str(scheme), bits, before.numel(), relative, float(lost.mean()))


@dataclass
class Walk:
    """One pass through the layers of `source`. `hidden` [B, S, C]: input of the next layer (None: no calibration).

    `device`: where layers are computed and rounded.
    """

    config: ModelConfig
    source: TensorSource
    pipeline: Pipeline
    scheme: QuantScheme
    hidden: Tensor | None
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.decoder = DecoderLayers(self.config, 1 if self.hidden is None else self.hidden.shape[1], self.device)
        # The type that norms are stored in. Rewritten norms are rounded to it before they are used (`as_stored`).
        self.dtype = self.source.dtype("model.norm.weight")

    def prepared(self, index: int) -> Block:
        """Layer `index`, rewritten by the methods in turn, not yet quantized."""
        block = read_block(self.config, self.source, index, self.device)
        for method in self.pipeline.methods:
            stats = {}
            if "hessian" in method.needs and type(method).prepare is not Quantizer.prepare:
                stats = {stage: self._stats(block, stage, stage in ("gate_up", "down")) for stage in STAGES}
            method.prepare(block, stats, self.config, lambda name: self.scheme.at(block.prefix + name))
        as_stored(block, self.dtype, self.config)
        return block

    def layer(self, index: int) -> tuple[Block, list[ModuleError]]:
        """Choose the codes of layer `index` and pass the hidden states through it."""
        block, errors = self.prepared(index), []
        for stage, names in STAGES.items():
            stats = None if self.hidden is None else self._stats(block, stage)
            for name in names:
                linear, module = block.linears[name], block.prefix + name
                scheme = resolve_scheme(self.config, self.source, self.scheme, module)
                if is_dense(scheme):  # "auto" becomes the type that the source stores
                    scheme = QuantScheme(scheme.format_for(self.source.dtype(f"{module}.weight")))
                before = linear.weight
                scheme = scheme.settled(before)  # fp8-auto becomes the format that fits better
                kept = self._as_stored(module, scheme, before)
                linear.store(self.pipeline.quantize(before, scheme, stats) if kept is None else kept)
                errors.append(module_error(block.prefix + name, scheme, before, linear.weight, stats))
            if self.hidden is not None and stage in ("o", "down"):
                step = self.decoder.after_attention if stage == "o" else self.decoder.after_mlp
                self.advance(step, block, self.hidden)
        return block, errors

    def _as_stored(self, module: str, scheme: QuantScheme, weight: Tensor) -> QuantTensor | None:
        """The source's own codes of a matrix, if it stores `weight` in the format of `scheme`."""
        own = self.source.scheme(f"{module}.weight")
        if own is None or replace(own, activations=scheme.activations) != scheme:
            return None
        q = moved(self.source.stored(f"{module}.weight"), self.device)
        return replace(q, activations=scheme.activations) if q.order is None and decoded(q).equal(weight) else None

    def skip(self, block: Block) -> None:
        """Pass the hidden states through a layer whose codes are chosen already."""
        if self.hidden is not None:
            self.advance(self.decoder.layer, block.to(self.device), self.hidden)

    def advance(self, step: Callable[[Block, Tensor], Tensor], block: Block, hidden: Tensor) -> None:
        """Replace hidden states [B, S, C] in place by a step of the decoder, chunk by chunk on the device."""
        for part in chunks(hidden):
            part.copy_(step(block, part.to(self.device)))

    def parts(self, hidden: Tensor) -> Iterator[Tensor]:
        """Hidden states [B, S, C] in chunks, on the device."""
        return (part.to(self.device) for part in chunks(hidden))

    def _stats(self, block: Block, stage: str, from_start: bool = False) -> Stats:
        """Statistics of a stage's inputs; `hidden` enters the stage's half of the layer (`from_start`: the layer)."""
        assert self.hidden is not None
        parts = self.parts(self.hidden)
        if from_start:  # the input of the second half is computed on the fly
            parts = map(partial(self.decoder.after_attention, block), parts)
        width = block.linears[STAGES[stage][0]].weight.shape[1]
        return Stats.of((self.decoder.inputs(block, stage, part) for part in parts), width, self.device)


def as_stored(block: Block, dtype: torch.dtype, config: ModelConfig) -> None:
    """Round norms and biases to `dtype`, as a checkpoint stores them, and adjust adjacent weights to compensate.

    The biases of o and down, which only `rotate` rewrites, are added to the residual stream: no weight can compensate.
    """
    for stage, name in NORM_OF.items():
        norm = block.norms[name]
        ratio = _ratio(norm, norm.to(dtype).float())
        for reader in STAGES[stage]:
            block.linears[reader].weight = block.linears[reader].weight / ratio
    shared = config.num_heads // config.num_kv_heads
    for writer, reader in ((V, O), (UP, DOWN)):
        linear = block.linears[writer]
        if linear.bias is None:
            continue
        ratio = _ratio(linear.bias, linear.bias.to(dtype).float())
        linear.weight = linear.weight * ratio[:, None]
        if writer == V:  # several query heads read one value head
            ratio = ratio.view(-1, 1, config.head_dim).expand(-1, shared, -1).flatten()
        block.linears[reader].weight = block.linears[reader].weight / ratio
    block.norms = {name: norm.to(dtype).float() for name, norm in block.norms.items()}
    for linear in block.linears.values():
        if linear.bias is not None:
            linear.bias = linear.bias.to(dtype).float()


def _ratio(exact: Tensor, rounded: Tensor) -> Tensor:
    """rounded / exact; 1 where rounding lost 1 % or more, since the value is too small for the type's precision."""
    ratio = rounded / exact
    return torch.where((ratio - 1).abs() < 0.01, ratio, 1.0)
