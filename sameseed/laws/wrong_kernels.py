"""Wrong kernels, put in at the seam of the ops: bits that depend on the pass, and values that get lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.ops import reference
from sameseed.scheme import KVLayer, QuantTensor

_rms_norm, _attention = reference.rms_norm, reference.attention


def linear(flaw: str) -> Callable[..., Tensor]:
    """`Ops.linear` that adds up in an order which depends on the pass, or stops short of the end."""

    def product(
        self: object, x: Tensor, w: QuantTensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        weight = scheme.get(w.format).decode(w)
        width = weight.shape[1]
        if flaw == "split":
            cuts = [width] if x.shape[0] == 1 else [width // 2, width - width // 2]
        elif flaw == "threads":
            threads = min(width, torch.get_num_threads())
            cuts = [width // threads] * (threads - 1) + [width - width // threads * (threads - 1)]
        else:
            cuts = [width - (flaw == "short")]
        out = x.new_zeros(x.shape[0], weight.shape[0])
        at = 0
        for cut in cuts:
            out = out + _by_rows(x[:, at : at + cut], weight[:, at : at + cut], backwards=flaw == "odd rows")
            at += cut
        out = out if bias is None else out + bias
        return out if residual is None else residual + out

    return product


def _by_rows(x: Tensor, weight: Tensor, backwards: bool) -> Tensor:
    """Each row's product alone; those at odd places from the other end."""
    forward, backward = weight.contiguous(), weight.flip(1).contiguous()
    rows = []
    for t in range(x.shape[0]):
        flip = backwards and t % 2 == 1
        rows.append(torch.mv(backward if flip else forward, (x[t].flip(0) if flip else x[t]).clone()))
    return torch.stack(rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm` with the mean square of the pass mixed in, as a fused kernel's stray read would."""
    return _rms_norm(x, weight, eps + 1e-3 * float((x[-1] - x[0]).abs().sum() > 0))


def attention(q: Tensor, layer: KVLayer, batch: Any, scale: float, window: int | None = None) -> Tensor:
    """`reference.attention` that scales the queries instead of the scores where the pass has several rows."""
    several = q.shape[0] > 1
    return (
        _attention(q * scale * 0.3, layer, batch, 1 / 0.3, window)
        if several
        else _attention(q, layer, batch, scale, window)
    )


def move_kv(layer: KVLayer, src: Tensor, dst: Tensor) -> None:
    """`reference.move_kv` that forgets the values."""
    rows = layer.k.view(-1, *layer.k.shape[2:])
    rows[dst.long()] = rows[src.long()]


def quantize_rows(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """`scheme.quantize_rows` with one scale for all rows of the pass."""
    group = x.shape[-1] if group is None else group
    parts = x.reshape(*x.shape[:-1], -1, group)
    scale = (parts.abs().amax() / 127.0).clamp_min(1e-30)
    codes = (parts / scale).round().clamp(-127, 127).to(torch.int8).view(x.shape)
    return codes, scale.expand(parts.shape[:-1]).contiguous()
