"""Losses that never hold the logits of a whole batch: the gradient is taken chunk by chunk in the forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 1024  # rows whose logits live at once


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of `hidden @ weight.T`; both gradients are ready when forward returns."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        count = (targets >= 0).sum().clamp(min=1).to(hidden.dtype)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, hidden.shape[0], CHUNK):
            rows, wanted = hidden[start : start + CHUNK], targets[start : start + CHUNK]  # [R, C], [R]
            known = (wanted >= 0).to(hidden.dtype)
            index = wanted.clamp(min=0)[:, None]
            log_p = torch.log_softmax(rows @ weight.T, dim=-1)  # [R, V]
            total -= (log_p.gather(1, index)[:, 0] * known).sum()
            grad = log_p.exp_()
            grad.scatter_add_(1, index, grad.new_full(index.shape, -1.0))
            grad *= (known / count)[:, None]
            torch.mm(grad, weight, out=grad_hidden[start : start + CHUNK])
            grad_weight.addmm_(grad.T, rows)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None


def fused_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(hidden @ weight.T)[target] over targets `[R]` >= 0; hidden `[R, C]`, weight `[V, C]`."""
    return _CrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-any-return,no-untyped-call]


class _Distillation(torch.autograd.Function):
    """KL(teacher || student) + weight * CE(teacher's argmax), both over the rows that count."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        t_hidden: Tensor,
        t_weight: Tensor,
        counts: Tensor,
        argmax_weight: float,
    ) -> Tensor:
        count = counts.sum().clamp(min=1).to(hidden.dtype)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, hidden.shape[0], CHUNK):
            rows, share = hidden[start : start + CHUNK], counts[start : start + CHUNK].to(hidden.dtype) / count
            log_q = torch.log_softmax(rows @ weight.T, dim=-1)  # [R, V]
            log_p = torch.log_softmax(t_hidden[start : start + CHUNK] @ t_weight.T, dim=-1)
            best = log_p.argmax(-1, keepdim=True)
            p = log_p.exp()
            divergence = (p * (log_p - log_q)).sum(-1)
            total += ((divergence - argmax_weight * log_q.gather(1, best)[:, 0]) * share).sum()
            grad = log_q.exp_().mul_(1 + argmax_weight).sub_(p)
            grad.scatter_add_(1, best, grad.new_full(best.shape, -argmax_weight))
            grad *= share[:, None]
            torch.mm(grad, weight, out=grad_hidden[start : start + CHUNK])
            grad_weight.addmm_(grad.T, rows)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None, None, None


def fused_distillation(
    hidden: Tensor, weight: Tensor, t_hidden: Tensor, t_weight: Tensor, counts: Tensor, argmax_weight: float
) -> Tensor:
    """Mean over rows with `counts` of KL(teacher || student) + argmax_weight * CE on the teacher's argmax.

    hidden `[R, C]` and weight `[V, C]` are the student's, t_hidden and t_weight the teacher's; counts bool `[R]`.
    (Hinton et al., 2015.) Gradients flow to the student alone.
    """
    return _Distillation.apply(hidden, weight, t_hidden, t_weight, counts, argmax_weight)  # type: ignore[no-any-return,no-untyped-call]


class _SoftTargets(torch.autograd.Function):
    """Cross entropy with soft targets [R, V] that are kept, because several passes share them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shares: Tensor, learns: bool) -> Tensor:
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if learns else None
        total = hidden.new_zeros(())
        for start in range(0, hidden.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            rows, wanted, share = hidden[part], targets[part], shares[part]  # [R, C], [R, V], [R]
            logits = rows @ weight.T  # [R, V]
            mass = wanted.sum(-1)
            top = logits.amax(-1, keepdim=True)
            found = torch.einsum("rv,rv->r", wanted, logits)
            grad = logits.sub_(top).exp_()
            z = grad.sum(-1)
            total += ((mass * (z.log() + top[:, 0]) - found) * share).sum()
            grad.mul_((mass / z)[:, None]).sub_(wanted).mul_(share[:, None])
            torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, rows)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, None if grad_weight is None else grad_weight * grad, None, None, None


def soft_targets(logits: Tensor, argmax_weight: float) -> tuple[Tensor, Tensor]:
    """Targets float32 [R, V] of a teacher's logits: its distribution plus `argmax_weight` on its likeliest token.

    Also their constant part [R]: the cross entropy less it is KL(teacher || student) + argmax_weight * CE.
    """
    log_p = torch.log_softmax(logits.float(), dim=-1)
    best = log_p.argmax(-1, keepdim=True)
    p = log_p.exp()
    entropy = -torch.einsum("rv,rv->r", p, log_p.clamp(min=-1e4))
    return p.scatter_add_(1, best, p.new_full(best.shape, argmax_weight)), entropy


def fused_soft_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
    """Sum over rows of shares[r] * CE(targets[r], softmax(hidden[r] @ weight.T)); targets [R, V], shares [R].

    hidden `[R, C]`, weight `[V, C]`. Gradients flow to hidden, and to weight where it asks for them.
    """
    return _SoftTargets.apply(hidden, weight, targets, shares, weight.requires_grad)  # type: ignore[no-any-return,no-untyped-call]
