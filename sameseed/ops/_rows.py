"""The input rows of a product: unchanged, normed, or gated. RowSource is named as in csrc/linear.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor


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
