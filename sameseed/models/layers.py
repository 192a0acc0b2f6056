"""A decoder layer: its weights, its forward pass, and the table of rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.models.config import ModelConfig, RopeConfig
from sameseed.ops import Ops, RowSource, Then, gated_rows, normed_rows, plain_rows
from sameseed.scheme import KVLayer, QuantTensor


class Weights:
    """Weights of a model, a layer or a part of one: a dataclass of matrices, vectors and parts like itself."""

    @property
    def matrices(self) -> tuple[QuantTensor, ...]:
        """All matrices, each once."""
        return tuple({id(m): m for m in _matrices(self)}.values())


def _matrices(w: Any) -> Iterator[QuantTensor]:
    if isinstance(w, QuantTensor):
        yield w
    elif isinstance(w, tuple) or is_dataclass(w):
        for part in w if isinstance(w, tuple) else (getattr(w, f.name) for f in fields(w)):
            yield from _matrices(part)


@dataclass(frozen=True)
class AttentionWeights(Weights):
    """Weights of a layer's attention and its norms; q, k, v are stacked along O. Norms and biases are float32.

    Where stacked weights have different formats, the stack is a tuple of several weights, in order.
    """

    input_norm: Tensor  # [C]
    qkv: QuantTensor | tuple[QuantTensor, ...]  # [(H + 2 Hk) D, C]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: QuantTensor  # [C, H D]
    o_bias: Tensor | None
    post_norm: Tensor  # [C]


@dataclass(frozen=True)
class LayerWeights(AttentionWeights):
    """Weights of one decoder layer; gate and up are stacked along O."""

    gate_up: QuantTensor | tuple[QuantTensor, ...]  # [2 I, C]
    gate_up_bias: Tensor | None
    down: QuantTensor  # [C, I]
    down_bias: Tensor | None


@dataclass(frozen=True)
class ModelWeights(Weights):
    """All weights of a model; with tied embeddings `lm_head` is `embedding`.

    `dense`: the float format of the matrices (`dense_format`); the default of the KV cache.
    """

    embedding: QuantTensor  # [V, C]
    layers: tuple[Any, ...]  # of the family's class: LayerWeights or alike
    norm: Tensor  # [C]
    lm_head: QuantTensor  # [V, C]
    dense: str = "fp32"

    @property
    def read_bytes(self) -> int:
        """Bytes that a pass may read: all but an embedding that is not the LM head too, of which it reads some rows."""
        looked_up = 0 if self.lm_head is self.embedding else self.embedding.nbytes
        return sum(m.nbytes for m in self.matrices) - looked_up


def run_layer(
    ops: Ops,
    c: ModelConfig,
    w: LayerWeights,
    rows: RowSource,
    residual: Tensor,
    batch: Batch,
    kv: KVLayer,
    rope: Tensor,
    window: int | None,
    then: Then | None = None,
) -> Tensor:
    """Run a decoder layer: attention reads `rows`, stores keys and values, and adds to `residual` [T, C].

    Returns the layer's output [T, C]. `then`: what the next layer does with this output.
    """
    x = attend(ops, c, w, rows, residual, batch, kv, rope, window, Then(w.post_norm, c.rms_eps, w.gate_up))
    gate_up = ops.product(normed_rows(x, w.post_norm, c.rms_eps), w.gate_up, w.gate_up_bias)  # [T, 2 I]
    return ops.product(gated_rows(gate_up), w.down, w.down_bias, x, then)


def attend(
    ops: Ops,
    c: ModelConfig,
    w: AttentionWeights,
    rows: RowSource,
    residual: Tensor,
    batch: Batch,
    kv: KVLayer,
    rope: Tensor,
    window: int | None,
    then: Then | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention of a layer; arguments and result as of `run_layer`."""
    qkv = ops.product(rows, w.qkv, w.qkv_bias)  # [T, (H + 2 Hk) D]
    norms = None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
    q = ops.rope_store(qkv, c.num_heads, kv, batch, rope, norms, c.rms_eps)  # [T, H, D]
    scale = c.head_dim**-0.5 if c.score_factor is None else c.score_factor
    out = ops.attention(q, kv, batch, scale, window, sinks)  # [T, H, D]
    return ops.product(plain_rows(out.view(-1, c.num_heads * c.head_dim)), w.o, w.o_bias, residual, then)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Frequencies float32 [D/2] of the rotary embedding, scaled by `rope.kind` (llama3: Llama 3.1's bands)."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "factors":
        return inverse / torch.tensor(rope.factors)
    if rope.kind == "yarn":  # Peng et al., 2023: from frequency number `low` on to number `high`, ever more is scaled

        def number(turns: float) -> float:  # of the frequency that turns so often within the original length
            return head_dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = number(rope.beta_fast), number(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
        return inverse / rope.factor * ramp + inverse * (1 - ramp)
    if rope.kind != "llama3":
        return inverse
    wavelength = 2 * math.pi / inverse
    low = rope.original_max_len / rope.low_freq_factor
    high = rope.original_max_len / rope.high_freq_factor
    smooth = (rope.original_max_len / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = torch.where(wavelength > low, inverse / rope.factor, inverse)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Cosines, then sines, of the angles at every position: float32 [P, D]."""
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies(rope, head_dim)[None, :]  # [P, D/2]
    return torch.cat([angles.cos(), angles.sin()], dim=1) * rope.magnitude
