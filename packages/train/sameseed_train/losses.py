"""Losses that never hold the logits of a whole batch: gradients are computed chunk by chunk in the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

CHUNK = 1024  # rows whose logits are in memory at once
Part = Callable[[slice, Tensor], tuple[Tensor, Tensor]]  # rows of a chunk, logits [R, V] -> sum of losses, its gradient


class _Fused(torch.autograd.Function):
    """Sum of a loss of the logits `hidden @ weight.T` over `count`; `part`: of a chunk, with gradients over `count`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, part: Part, count: Tensor | float) -> Tensor:
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        device = hidden.device.type
        lower = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        low = torch.get_autocast_dtype(device) if lower else hidden.dtype
        matrix = weight.to(low)
        # Matrix products run in type `low`, all else in float32.
        with torch.autocast(device, enabled=False) if lower else nullcontext():
            for start in range(0, hidden.shape[0], CHUNK):
                place = slice(start, start + CHUNK)
                rows = hidden[place].to(low)  # [R, C]
                loss, grad = part(place, (rows @ matrix.T).to(total.dtype))
                total += loss
                grad = grad.to(low)
                grad_hidden[place] = grad @ matrix
                if grad_weight is not None:
                    grad_weight += grad.T @ rows
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, None if grad_weight is None else grad_weight * grad, None, None


def fused_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(hidden @ weight.T)[target] over targets `[R]` >= 0; hidden `[R, C]`, weight `[V, C]`."""
    count = (targets >= 0).sum().clamp(min=1).float()

    def part(place: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        known = (targets[place] >= 0).to(logits.dtype)
        index = targets[place].clamp(min=0)[:, None]
        log_p = torch.log_softmax(logits, dim=-1)
        loss = -(log_p.gather(1, index)[:, 0] * known).sum()
        grad = log_p.exp_().scatter_add_(1, index, log_p.new_full(index.shape, -1.0))
        return loss, grad.mul_((known / count)[:, None])

    return _Fused.apply(hidden, weight, part, count)  # type: ignore[no-any-return,no-untyped-call]


def soft_targets(logits: Tensor, argmax_weight: float) -> tuple[Tensor, Tensor]:
    """Targets float32 [R, V]: a teacher's distribution plus `argmax_weight` on its best token; and its entropy [R]."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    best = log_p.argmax(-1, keepdim=True)
    p = log_p.exp()
    entropy = -torch.einsum("rv,rv->r", p, log_p.clamp(min=-1e4))  # cross entropy less it: KL + argmax_weight * CE
    return p.scatter_add_(1, best, p.new_full(best.shape, argmax_weight)), entropy


def fused_soft_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, shares: Tensor, places: Tensor | None = None
) -> Tensor:
    """Sum over rows of shares[r] * CE(targets[r], softmax(hidden[r] @ weight.T)); targets [R, V], shares [R].

    `places` int64 [R]: row r uses targets[places[r]] of targets [P, V], since several rows may share targets.
    hidden `[R, C]`, weight `[V, C]`. Gradients flow to hidden, and to weight if it requires them.
    """

    def part(place: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        wanted, share = targets[place if places is None else places[place]], shares[place]
        mass = wanted.sum(-1)
        top = logits.amax(-1, keepdim=True)
        found = (wanted * logits).sum(-1)
        grad = logits.sub_(top).exp_()
        z = grad.sum(-1)
        loss = ((mass * (z.log() + top[:, 0]) - found) * share).sum()
        return loss, grad.mul_((mass / z)[:, None]).sub_(wanted).mul_(share[:, None])

    return _Fused.apply(hidden, weight, part, 1.0)  # type: ignore[no-any-return,no-untyped-call]
