"""What ops take besides tensors: rows of a product (RowSource as in csrc/linear.h), experts, DeltaNet layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from sameseed.scheme import QuantTensor, split_outliers

BLOCK_OUTPUTS = 32  # of packed weights (`block_outputs` in csrc/kernels.h), which are packed in chunks of whole blocks


class RowSource(NamedTuple):
    """The rows of a product: x [T, K] unchanged, rms_norm(x), or silu_mul(x) or gelu_mul(x) with x [T, 2 K]."""

    x: Tensor
    kind: Literal["plain", "norm", "silu", "gelu"] = "plain"
    norm: Tensor | None = None  # weight [K] of "norm"
    eps: float = 0.0
    row_ids: Tensor | None = None  # int32 [R]: use only these rows of x; None: all rows

    @property
    def width(self) -> int:
        """K."""
        return self.x.shape[1] // 2 if self.kind in ("silu", "gelu") else self.x.shape[1]

    def prepared(
        self,
        rms_norm: Callable[[Tensor, Tensor, float], Tensor],
        silu_mul: Callable[[Tensor], Tensor],
        gelu_mul: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The rows as one tensor [T, K], computed with the given ops."""
        x = self.x if self.row_ids is None else self.x.index_select(0, self.row_ids)
        if self.norm is not None:
            return rms_norm(x, self.norm, self.eps)
        return silu_mul(x) if self.kind == "silu" else gelu_mul(x) if self.kind == "gelu" else x


class Then(NamedTuple):
    """What a product's result is used for next: normed by `norm` [C], then multiplied by `w`.

    A backend may start this work early; no bits change.
    """

    norm: Tensor
    eps: float
    w: Any  # a QuantTensor, or a tuple of several


def plain_rows(x: Tensor, row_ids: Tensor | None = None) -> RowSource:
    """The rows of x [T, K] unchanged, or only its rows `row_ids` int32 [R]."""
    return RowSource(x, row_ids=row_ids)


def normed_rows(x: Tensor, norm: Tensor, eps: float, row_ids: Tensor | None = None) -> RowSource:
    """rms_norm(x, norm, eps) of x [T, K], or of only its rows `row_ids` int32 [R]."""
    return RowSource(x, "norm", norm, eps, row_ids)


def gated_rows(gate_up: Tensor, gate: Literal["silu", "gelu"] = "silu") -> RowSource:
    """silu_mul(gate_up), or gelu_mul(gate_up), of gate_up [T, 2 K]."""
    return RowSource(gate_up, gate)


Views = tuple[QuantTensor, QuantTensor]


def outlier_views(w: QuantTensor) -> Views:
    """The same weight twice: for rows quantized to int8, and for float rows."""
    return replace(w, activations="int8"), replace(w, activations=None)


def outlier_product(
    of: Callable[..., Tensor], x: Tensor, w: Views, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """A product (`reference.product`) of int8 rows x [T, K] whose outliers stay floats; `of` computes its two parts.

    Rows without outliers skip the second product, so their bits are those of int8 activations, whatever other rows are
    in the batch.
    """
    integers, floats = w
    rest, outliers = split_outliers(x)
    out = of(plain_rows(rest), integers, bias, residual)
    rows = outliers.any(1).nonzero().flatten()
    if len(rows):
        out[rows] = of(plain_rows(outliers[rows]), floats, None, out[rows])
    return out


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """A router over E experts of width F, and the experts; biases are float32.

    `top_k`: experts of a row. `normalize`: their weights are a softmax over the chosen logits, else over all.
    `limit`: gates are gpt-oss's clamped SwiGLU (`silu_mul`); `act`: "gelu" in place of that. `factors`: of the weights.
    `chosen_by`: the weights are sigmoids of the logits, over their sum if `normalize`, times `factor`; with these
    numbers added, the sigmoids choose.
    """

    router: QuantTensor  # [E, C]
    router_bias: Tensor | None  # [E]
    gate_up: tuple[QuantTensor, ...]  # per expert [2 F, C]: rows of the gate, then of up
    gate_up_bias: Tensor | None  # [E, 2 F]
    down: tuple[QuantTensor, ...]  # per expert [C, F]
    down_bias: Tensor | None  # [E, C]
    top_k: int
    normalize: bool
    limit: float | None = None
    act: Literal["silu", "gelu"] = "silu"
    factors: Tensor | None = None  # [E]
    chosen_by: Tensor | None = None  # [E]
    factor: float = 1.0


def parted(w: QuantTensor, count: int) -> tuple[QuantTensor, ...] | None:
    """Views of `count` equal matrices that are stacked along O; None if they do not begin at blocks."""
    height = w.shape[0] // count
    if w.layout != "plain" and height % BLOCK_OUTPUTS:
        return None

    def part(i: int, x: Tensor) -> Tensor:
        size = len(x) // count
        return x[i * size : (i + 1) * size]

    shape = (height, w.shape[1])
    return tuple(replace(w, shape=shape, parts={n: part(i, x) for n, x in w.parts.items()}) for i in range(count))


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """Weights of a Gated DeltaNet layer besides its matrices, all float32.

    `tiled`: value head h reads key head h modulo their number, as in GGUF files; else neighbours share a key head.
    """

    conv: Tensor  # [taps, 2 Hk K + H D]
    decay: Tensor  # [H]: -exp(A_log)
    bias: Tensor  # [H]: dt_bias
    norm: Tensor  # [D]
    eps: float
    tiled: bool = False


@dataclass(frozen=True, eq=False)
class StateLayer:
    """States of one layer: state float32 [slots, H, K, D], log float32 [slots, rows, 2 Hk K + H D + 2 H].

    A short convolution has no state, and a log [slots, rows, C].
    """

    state: Tensor
    log: Tensor
