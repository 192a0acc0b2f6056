"""Products of int8 rows whose outliers stay floats, as the sum of an integer product and a float product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from sameseed.ops._rows import plain_rows
from sameseed.scheme import QuantTensor, split_outliers

Views = tuple[QuantTensor, QuantTensor]


def views(w: QuantTensor) -> Views:
    """The same weight twice: for rows quantized to int8, and for float rows."""
    return replace(w, activations="int8"), replace(w, activations=None)


def product(
    of: Callable[..., Tensor], x: Tensor, w: Views, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Rows x [T, K] times w [O, K] transposed, plus bias [O], plus residual [T, O]; `of` computes both products.

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
