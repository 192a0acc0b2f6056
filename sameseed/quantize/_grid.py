"""Rounding to the codes of any format: which values the codes can take, and how much of a group's range to clip.

No code here depends on a format: levels come from decoding every code, clipping ranges from encoding clipped weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sameseed import scheme as formats
from sameseed.errors import ConfigError
from sameseed.scheme import QuantTensor

Encode = Callable[[Tensor], QuantTensor]
RATIOS = (0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.65, 0.6)  # of a group's range, tried by `clip`


def possible_codes(q: QuantTensor) -> Tensor:
    """All codes [n] of a stored weight's format. Raises ConfigError if the format does not have one code per value."""
    codes = q.parts.get("codes")
    bits = formats.get(q.format).bits
    if codes is None or codes.shape != q.shape:
        raise ConfigError(f"format {q.format!r} cannot be rounded column by column; take --method rtn or awq for it")
    own: range | None = getattr(formats.get(q.format), "codes", None)
    if own is None and codes.dtype == torch.int8:
        own = range(1 - 2 ** (bits - 1), 2 ** (bits - 1))
    return torch.tensor(range(2**bits) if own is None else own, device=codes.device).to(codes.dtype)


def unit(q: QuantTensor) -> int:
    """The number U of consecutive values in a row with the same code levels: a group, or a K-quant's sub-block."""
    steps = q.parts.get("steps")
    return q.group if steps is None else q.shape[1] // steps.shape[1]


class CodeGrid:
    """The values that codes can take in each row and unit (see `unit`) of a stored weight, for its given scales."""

    def __init__(self, q: QuantTensor) -> None:
        every, group, (height, width) = possible_codes(q), unit(q), q.shape
        decode = formats.get(q.format).decode
        found = []
        for start in range(0, len(every), group):
            cycle = every[(start + torch.arange(group, device=every.device)) % len(every)]
            codes = cycle.repeat(width // group).expand(height, width).contiguous()
            found.append(decode(replace(q, parts={**q.parts, "codes": codes})).view(height, -1, group))
        levels = torch.cat(found, dim=-1)[..., : len(every)]  # [O, K / U, n]
        usable = levels.isfinite().flatten(0, 1).all(0)
        self.levels, order = levels[..., usable].sort(dim=-1, stable=True)
        self.codes = every[usable][order]  # [O, K / U, n]

    def nearest(self, x: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Codes and values [O] nearest to x [O], a column in unit `group` (the lower one on a tie)."""
        levels = self.levels[:, group].contiguous()
        above = torch.searchsorted(levels, x[:, None].contiguous()).clamp_(1, levels.shape[1] - 1)
        low, high = levels.gather(1, above - 1), levels.gather(1, above)
        index = torch.where(x[:, None] - low <= high - x[:, None], above - 1, above)
        return self.codes[:, group].gather(1, index).squeeze(1), levels.gather(1, index).squeeze(1)


def clip(weight: Tensor, encode: Encode, hessian: Tensor) -> Tensor:
    """Clip each group of weight [O, K] to the share of its range that gives the least output error.

    Outliers lose some accuracy, so that all other values get finer steps (Lin et al., 2023, search the same in 20
    steps). The error of a group is computed with its own block of the Hessian [K, K].
    """
    q = encode(weight)
    height, width = weight.shape
    group = q.group
    decode = formats.get(q.format).decode
    blocks = torch.stack([hessian[i : i + group, i : i + group] for i in range(0, width, group)])  # [K / G, G, G]
    grouped = weight.view(height, -1, group)
    low, high = grouped.aminmax(dim=-1)  # [O, K / G]

    def cut(ratio: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(grouped, (low * ratio)[..., None]), (high * ratio)[..., None]).flatten(1)

    def error(stored: QuantTensor) -> Tensor:
        delta = (decode(stored) - weight).view(height, -1, group).transpose(0, 1)  # [K / G, O, G]
        return (torch.bmm(delta, blocks) * delta).sum(-1).T  # [O, K / G]

    best = error(q)
    ratio = torch.ones_like(low)
    for trial in RATIOS:
        found = error(encode(cut(torch.full_like(low, trial))))
        better = found < best
        best, ratio = torch.where(better, found, best), torch.where(better, trial, ratio)

    def lost(stored: QuantTensor) -> Tensor:
        delta = decode(stored) - weight
        return ((delta @ hessian) * delta).sum(1)  # [O]

    # Groups were judged one by one: a row whose whole error grows keeps its range. Where rows share scales, this may
    # not be enough; then the whole weight keeps its range.
    plain = lost(q)
    ratio[lost(encode(cut(ratio))) >= plain] = 1.0
    found = cut(ratio)
    return found if lost(encode(found)).sum() <= plain.sum() else weight
