"""How the rows of a product come in: as they are, normed, or gated. The noun is that of csrc/linear.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor


class RowSource(NamedTuple):
    """The rows of a product: x [T, K] as they are, rms_norm(x), or silu_mul(x) of x [T, 2 K]."""

    x: Tensor
    kind: Literal["plain", "norm", "silu"] = "plain"
    norm: Tensor | None = None  # [K], of "norm"
    eps: float = 0.0
    row_ids: Tensor | None = None  # int32 [R]: these rows of x alone; None: all

    def prepared(
        self, rms_norm: Callable[[Tensor, Tensor, float], Tensor], silu_mul: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The rows as one tensor [T, K], made by these ops."""
        x = self.x if self.row_ids is None else self.x.index_select(0, self.row_ids)
        if self.norm is not None:
            return rms_norm(x, self.norm, self.eps)
        return silu_mul(x) if self.kind == "silu" else x


class Then(NamedTuple):
    """What a product's rows become next: normed [C], multiplied by `w`. A backend may begin with it; no bits change."""

    norm: Tensor
    eps: float
    w: Any  # QuantTensor, or several side by side


def plain_rows(x: Tensor, row_ids: Tensor | None = None) -> RowSource:
    """The rows of x [T, K], or of its rows `row_ids` int32 [R] alone."""
    return RowSource(x, row_ids=row_ids)


def normed_rows(x: Tensor, norm: Tensor, eps: float, row_ids: Tensor | None = None) -> RowSource:
    """rms_norm(x, norm, eps) of x [T, K], or of its rows `row_ids` int32 [R] alone."""
    return RowSource(x, "norm", norm, eps, row_ids)


def gated_rows(gate_up: Tensor) -> RowSource:
    """silu_mul(gate_up) of gate_up [T, 2 K]."""
    return RowSource(gate_up, "silu")
