"""A decoder layer: its weights, its forward pass, and the table of rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.models.config import ModelConfig, RopeConfig
from sameseed.ops import ExpertWeights, Ops, RowSource, Then, gated_rows, normed_rows, plain_rows
from sameseed.scheme import KVLayer, QuantTensor


class Weights:
    """Weights of a model, a layer or a part of one: a dataclass of matrices, vectors and parts like itself."""

    @property
    def matrices(self) -> tuple[QuantTensor, ...]:
        """All matrices, each once."""
        return tuple({id(m): m for m in _matrices(self)}.values())

    @property
    def read_bytes(self) -> int:
        """Bytes that a pass may read: all but an embedding that is not the LM head too, of which it reads some rows."""
        embedding: QuantTensor | None = getattr(self, "embedding", None)
        looked_up = 0 if embedding is None or embedding is getattr(self, "lm_head", None) else embedding.nbytes
        return sum(m.nbytes for m in self.matrices) - looked_up


def _matrices(w: Any) -> Iterator[QuantTensor]:
    if isinstance(w, QuantTensor):
        yield w
    elif isinstance(w, tuple) or is_dataclass(w):
        for part in w if isinstance(w, tuple) else (getattr(w, f.name) for f in fields(w)):
            yield from _matrices(part)


@dataclass(frozen=True, kw_only=True)
class LayerWeights(Weights):
    """Weights of one decoder layer; q, k, v and gate, up are stacked along O. Norms, biases: float32.

    Where stacked weights have different formats, the stack is a tuple of several weights, in order. `columns`: of the
    product with `qkv`, where only some dimensions of a head rotate (`rotary_columns`), or where q stands beside a gate.
    `shared`: where the MLP is an expert that all rows take, its own gate. `mixer`: of a recurrent layer, what works on
    the product with `qkv`: a family's own weights.
    """

    input_norm: Tensor  # [C]
    qkv: QuantTensor | tuple[QuantTensor, ...]  # [(H + 2 Hk) D, C]; with gates [(2 H + 2 Hk) D, C]
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    columns: Tensor | None = None
    sinks: Tensor | None = None  # [H]: logits that join the softmax
    o: QuantTensor  # [C, H D]
    o_bias: Tensor | None = None
    post_norm: Tensor  # [C]
    gate_up: QuantTensor | tuple[QuantTensor, ...] | None = None  # [2 I, C]; None: no MLP, but experts
    gate_up_bias: Tensor | None = None
    down: QuantTensor | None = None  # [C, I]
    down_bias: Tensor | None = None
    experts: ExpertWeights | None = None
    shared: SharedGate | None = None
    mixer: Any = None

    @property
    def head_norms(self) -> tuple[Tensor, Tensor] | None:
        """The norms of queries and keys."""
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)


@dataclass(frozen=True, eq=False)
class SharedGate(Weights):
    """The gate of a shared expert: a number for each row, whose sigmoid multiplies what the expert adds."""

    gate: QuantTensor  # [1, C]
    up: Tensor  # int32 [I]: columns of `up` beside `gate`
    same: Tensor  # int32 [I]: zeros

    def __call__(self, ops: Ops, rows: RowSource, gate_up: Tensor) -> Tensor:
        """Gate and up [T, 2 I] with up multiplied, which does the same."""
        gates = ops.take(ops.product(rows, self.gate), self.same)  # [T, I], the same number in each column
        return ops.beside([gate_up[:, : len(self.up)], ops.gate(ops.take(gate_up, self.up), gates, 1)])


@dataclass(frozen=True)
class ModelWeights(Weights):
    """All weights of a model; with tied embeddings `lm_head` is `embedding`.

    `dense`: the float format of the matrices (`dense_format`); the default of the KV cache.
    """

    embedding: QuantTensor  # [V, C]
    layers: tuple[Any, ...]  # of the family's class
    norm: Tensor  # [C]
    lm_head: QuantTensor  # [V, C]
    dense: str = "fp32"


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
    out = attention(ops, c, w, rows, batch, kv, rope, window)
    return feed_forward(ops, c, w, ops.product(plain_rows(out), w.o, w.o_bias, residual, before_mlp(c, w)), then)


def attention(
    ops: Ops,
    c: ModelConfig,
    w: LayerWeights,
    rows: RowSource,
    batch: Batch,
    kv: KVLayer,
    rope: Tensor,
    window: int | None,
) -> Tensor:
    """What attention reads from the cache, [T, H D], once it has stored the keys and values of `rows`."""
    qkv, width = ops.product(rows, w.qkv, w.qkv_bias), c.num_heads * c.head_dim  # [T, (H + 2 Hk) D]
    chosen = qkv if w.columns is None else ops.take(qkv, w.columns)
    q = ops.rope_store(chosen, c.num_heads, kv, batch, rope, w.head_norms, c.rms_eps)  # [T, H, D]
    scale = c.head_dim**-0.5 if c.score_factor is None else c.score_factor
    out = ops.attention(q, kv, batch, scale, window, w.sinks).view(-1, width)  # [T, H D]
    return ops.gate(out, qkv[:, : 2 * width], c.num_heads) if c.gated else out


def before_mlp(c: ModelConfig, w: LayerWeights) -> Then | None:
    """What a layer's MLP does with what it reads."""
    return None if w.gate_up is None else Then(w.post_norm, c.rms_eps, w.gate_up)


def feed_forward(ops: Ops, c: ModelConfig, w: LayerWeights, x: Tensor, then: Then | None) -> Tensor:
    """x [T, C] plus the layer's MLP of it, plus its experts."""
    rows, added = normed_rows(x, w.post_norm, c.rms_eps), x
    if w.gate_up is not None and w.down is not None:
        gate_up = ops.product(rows, w.gate_up, w.gate_up_bias)  # [T, 2 I]
        gate_up = gate_up if w.shared is None else w.shared(ops, rows, gate_up)
        added = ops.product(gated_rows(gate_up), w.down, w.down_bias, x, then if w.experts is None else None)
    return added if w.experts is None else ops.experts(rows, w.experts, added)


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
    length, first, last = rope.original_max_len, rope.low_freq_factor, rope.high_freq_factor
    low, high = length / first, length / last
    smooth = (length / wavelength - first) / (last - first)
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = torch.where(wavelength > low, inverse / rope.factor, inverse)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Cosines, then sines, of the angles at every position: float32 [P, D]; of `rotary_order`'s dimensions.

    With LongRoPE the number of positions decides between its factors: so a row never depends on the text's length.
    """
    if rope.long_factors and num_positions > rope.original_max_len:
        rope = replace(rope, factors=rope.long_factors)
    inverse = inverse_frequencies(rope, rope.rotary_dim or head_dim)
    angles = torch.arange(num_positions).float()[:, None] * inverse[None, :]  # [P, rotary dimensions / 2]
    still = torch.zeros(num_positions, head_dim // 2 - len(inverse))
    return torch.cat([angles.cos() * rope.magnitude, still + 1, angles.sin() * rope.magnitude, still], dim=1)


def rotary_order(head_dim: int, rotary_dim: int) -> Tensor:
    """A head's dimensions: the first half of those that rotate, as many others, then the second halves of both.

    So its two halves rotate together; those that do not rotate have the angle 0.
    """
    half, rest = rotary_dim // 2, (head_dim + rotary_dim) // 2
    parts = (range(half), range(rotary_dim, rest), range(half, rotary_dim), range(rest, head_dim))
    return torch.tensor([i for part in parts for i in part])


def rotary_columns(c: ModelConfig) -> Tensor:
    """Columns int32 of q, k and v, the heads of q and k in `rotary_order`; a gate may stand behind each head of q."""
    dim, order = c.head_dim, rotary_order(c.head_dim, c.rope.rotary_dim or c.head_dim)
    apart = 2 * dim if c.gated else dim
    keys, wide = c.num_heads * apart, c.num_kv_heads * dim
    starts = [*range(0, keys, apart), *range(keys, keys + wide, dim)]
    return torch.cat([start + order for start in starts] + [torch.arange(keys + wide, keys + 2 * wide)]).int()
