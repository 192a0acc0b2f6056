"""Quantizer gptq: round column after column, each time moving the error to the columns that follow.

Frantar et al. (2023), "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.fields import within
from sameseed.quantize import DOUBLE, Quantizer, Stats, decoded
from sameseed.quantize._grid import CodeGrid, clip, unit
from sameseed.scheme import QuantScheme, QuantTensor


class Gptq(Quantizer):
    """Groups keep the scales of the original weights."""

    needs = frozenset({"hessian"})
    rounds = True

    @dataclass(frozen=True)
    class Options(Quantizer.Options):
        """`damping`: this share of its mean is added to the Hessian's diagonal; `block`: columns passed on at once.

        `act_order`: round columns with large inputs first. `clip`: search each group's range before rounding.
        """

        damping: float = within(0.01, 0, 1000)
        block: int = within(128, 1)
        act_order: bool = True
        clip: bool = True

    def quantize(self, weight: Tensor, scheme: QuantScheme, stats: Stats | None) -> QuantTensor:
        assert stats is not None  # a run without calibration text is refused before
        weight = weight.float()
        plain = scheme.encode(weight)
        better = self._rounded(weight, scheme, stats)
        # Greedy rounding may be worse than rounding to nearest in some rows; these rows are rounded to nearest.
        lost = stats.error(weight, decoded(better)) - stats.error(weight, decoded(plain))  # [O]
        together = scheme.rows_together  # rows that share scales are decided together; 0: all rows
        if together == 0:
            return plain if lost.sum() > 0 else better
        worse = torch.stack([part.sum() for part in torch.split(lost, together)]) > 0
        first = worse.repeat_interleave(together)[: len(lost)]
        parts = {
            name: torch.where(first.view(-1, *[1] * (part.dim() - 1)), plain.parts[name], part)
            for name, part in better.parts.items()
        }
        return replace(better, parts=parts)

    def _rounded(self, weight: Tensor, scheme: QuantScheme, stats: Stats) -> QuantTensor:
        o, hessian = self.options, stats.hessian
        q = scheme.encode(clip(weight, scheme.encode, hessian) if o.clip else weight)
        order = torch.arange(weight.shape[1], device=weight.device)
        if o.act_order:
            order = hessian.diagonal().argsort(descending=True, stable=True)
        key = ("gptq", o.damping, o.act_order)
        factor = stats.kept(key, lambda: inverse_factor(hessian[order][:, order], o.damping))
        return _round_columns(weight[:, order], q, order, factor, o.block)


def _round_columns(weight: Tensor, q: QuantTensor, order: Tensor, factor: Tensor, block: int) -> QuantTensor:
    """Round weight [O, K], whose columns are sorted by `order`, column by column, to codes of q's format and scales.

    `factor` [K, K]: see `inverse_factor`.
    """
    work, width, group, grid = weight.clone(), weight.shape[1], unit(q), CodeGrid(q)
    columns: list[int] = order.tolist()  # read at once: on a GPU every read waits for the device
    rounded = q.parts["codes"].clone()
    for begin in range(0, width, block):
        end = min(begin + block, width)
        errors = work.new_empty(work.shape[0], end - begin)
        for i in range(begin, end):
            at, x = columns[i], work[:, i]
            codes, values = grid.nearest(x, at // group)
            rounded[:, at] = codes
            errors[:, i - begin] = error = (x - values) / factor[i, i]
            work[:, i:end] -= error[:, None] * factor[i, i:end]  # passed on within the block
        if end < width:
            work[:, end:] -= errors @ factor[begin:end, end:]
    return replace(q, parts={**q.parts, "codes": rounded})


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper factor U [K, K] of the damped Hessian's inverse U^T U; damping grows until the Hessian is definite.

    Raises ConfigError where eight rounds of damping are not enough.
    """
    work = hessian.double() if len(hessian) <= DOUBLE else hessian.clone()
    diagonal = work.diagonal()
    mean = diagonal.mean()
    if mean <= 0:
        return torch.eye(len(hessian), device=hessian.device)
    diagonal += damping * mean
    for _ in range(8):
        lower, info = torch.linalg.cholesky_ex(work)
        if not info:
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not info:
                found: Tensor = upper.float()
                return found
        diagonal += max(damping, 0.01) * mean
        damping *= 2
    raise ConfigError("the inputs' statistics cannot be inverted; raise the option damping of gptq (e.g. 0.1)")


METHOD = Gptq
