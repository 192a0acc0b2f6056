"""Quantizer gptq: round column after column, each time moving the error to the columns that follow.

Frantar et al. (2023), "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.quantize import DOUBLE, Quantizer, Stats, decoded, is_dense
from sameseed.quantize._grid import CodeGrid, Encode, clip, independent
from sameseed.scheme import QuantScheme, QuantTensor


class Gptq(Quantizer):
    """Groups' scales are found when their first column is reached, from weights that carry the error so far."""

    needs = frozenset({"hessian"})
    rounds = True

    @dataclass(frozen=True)
    class Options:
        """`damping`: share of the mean diagonal added to it; `block`: columns whose error is passed on at once.

        `act_order`: columns of large inputs first; groups then keep the scales of the original weights, so that the
        stored layout is the usual one. `clip`: search each group's range before rounding.
        """

        damping: float = 0.01
        block: int = 128
        act_order: bool = False
        clip: bool = True

        def __post_init__(self) -> None:
            if not 0 <= self.damping < math.inf:
                raise ConfigError(f"gptq's damping is a share of at least 0, e.g. 0.01; got {self.damping:g}")
            if self.block < 1:
                raise ConfigError(f"gptq's block is at least 1 column, e.g. 128; got {self.block}")

    def quantize(self, weight: Tensor, scheme: QuantScheme, stats: Stats | None) -> QuantTensor:
        if stats is None:
            raise ConfigError("gptq needs calibration text; give --calibration FILE, or take --method rtn")
        if is_dense(scheme):
            return scheme.encode(weight)
        weight = weight.float()
        plain = scheme.encode(weight)
        better = self._rounded(weight, scheme, stats)
        # A greedy order may lose against rounding to nearest in some rows; these keep the latter.
        lost = stats.error(weight, decoded(better)) - stats.error(weight, decoded(plain))
        return _choose_rows(lost, plain, better, scheme.rows_together)

    def _rounded(self, weight: Tensor, scheme: QuantScheme, stats: Stats) -> QuantTensor:
        o = self.options
        encode = scheme.encode
        start = clip(weight, encode, stats.hessian) if o.clip else weight
        q = encode(start)
        if o.act_order:
            order = stats.hessian.diagonal().argsort(descending=True, stable=True)
        else:
            order = torch.arange(weight.shape[1], device=weight.device)
        along = not o.act_order and independent(start, q, encode)
        key = ("gptq", o.damping, o.act_order)
        factor = stats.kept(key, lambda: inverse_factor(stats.hessian[order][:, order], o.damping))
        pass_ = _Pass(weight[:, order], q, order, factor, stats.hessian if o.clip else None)
        return pass_.run(o.block, encode if along else None)


class _Pass:
    """One weight on its way: `work` [O, K] in the order of the columns, `q` as stored so far."""

    def __init__(self, work: Tensor, q: QuantTensor, order: Tensor, factor: Tensor, hessian: Tensor | None) -> None:
        self.work = work.clone()
        self.q, self.factor, self.hessian = q, factor, hessian
        self.order: list[int] = order.tolist()  # at once: on a GPU each number asked for is a wait
        self.grid = CodeGrid(q)
        self.parts = {name: part.clone() for name, part in q.parts.items()}

    def run(self, block: int, encode: Encode | None) -> QuantTensor:
        """Round every column; `encode` where groups get their scales on the way."""
        width = self.work.shape[1]
        for begin in range(0, width, block):
            end = min(begin + block, width)
            errors = self.work.new_empty(self.work.shape[0], end - begin)
            for i in range(begin, end):
                if encode is not None and i % self.q.group == 0:
                    self._open_group(i, begin, end, errors, encode)
                errors[:, i - begin] = self._column(i, end)
            if end < width:
                self.work[:, end:] -= errors @ self.factor[begin:end, end:]
        return replace(self.q, parts=self.parts)

    def _open_group(self, i: int, begin: int, end: int, errors: Tensor, encode: Encode) -> None:
        group = self.q.group
        values = self.work[:, i : i + group].clone()
        if i + group > end and i > begin:  # what the open block still owes to the group's later columns
            values[:, end - i :] -= errors[:, : i - begin] @ self.factor[begin:i, end : i + group]
        if self.hessian is not None:
            values = clip(values, encode, self.hessian[i : i + group, i : i + group])
        found = encode(values)
        at = i // group
        for name, part in found.parts.items():
            if name != "codes":
                self.parts[name][:, at] = part[:, 0]
        fresh = CodeGrid(found)
        self.grid.levels[:, at], self.grid.codes[:, at] = fresh.levels[:, 0], fresh.codes[:, 0]

    def _column(self, i: int, end: int) -> Tensor:
        """Round column i; the error over the factor's diagonal [O], passed on within the block."""
        at = self.order[i]
        x = self.work[:, i]
        codes, values = self.grid.nearest(x, at // self.q.group)
        self.parts["codes"][:, at] = codes
        error = (x - values) / self.factor[i, i]
        self.work[:, i:end] -= error[:, None] * self.factor[i, i:end]
        return error


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper factor U [K, K] of the damped Hessian's inverse, U^T U; more damping where it is not definite."""
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


def _choose_rows(lost: Tensor, a: QuantTensor, b: QuantTensor, together: int) -> QuantTensor:
    """Rows of `a` where `b` loses more than it, `lost` [O] > 0, else of `b`; rows that share something stay together.

    `together`: see QuantScheme.rows_together.
    """
    if together == 0:
        return a if lost.sum() > 0 else b
    worse = torch.stack([part.sum() for part in torch.split(lost, together)]) > 0
    first = worse.repeat_interleave(together)[: len(lost)]
    parts = {
        name: torch.where(first.view(-1, *[1] * (part.dim() - 1)), a.parts[name], part)
        for name, part in b.parts.items()
    }
    return replace(b, parts=parts)


METHOD = Gptq
