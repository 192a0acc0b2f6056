"""The optimizer: Muon for the matrices of the layers, AdamW for embeddings and norms.

Muon (Jordan et al., 2024) replaces the momentum of each matrix by the nearest orthogonal matrix, and needs fewer tokens
than AdamW. Matrices of equal shape are orthogonalised together, by products in the precision of the training:
`torch.optim.Muon` always multiplies in bfloat16, for which many CPUs have no instructions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Quintic iteration x <- a x + b (x x^T) x + c (x x^T)^2 x, tuned for slope at zero rather than convergence to one.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)

# Matrices whose rows are tokens: trained with AdamW, not with Muon.
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of every matrix in x `[n, rows, cols]` to about one, by Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


@dataclass(frozen=True)
class OptimSettings:
    """Learning rates and decays; `matrix_lr` drives Muon, `lr` drives AdamW."""

    matrix_lr: float = 0.02
    lr: float = 0.004
    weight_decay: float = 0.05
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)


class MuonAdamW:
    """Muon and AdamW as one optimizer, whose whole state is a flat dict of tensors (for safetensors)."""

    def __init__(self, model: nn.Module, settings: OptimSettings) -> None:
        self.settings = settings
        self.num_steps = 0
        named = list(model.named_parameters())
        self.matrices = [(n, p) for n, p in named if p.ndim == 2 and not n.endswith(VOCABULARY)]
        self.others = [(n, p) for n, p in named if p.ndim != 2 or n.endswith(VOCABULARY)]
        self.momentum = {n: torch.zeros_like(p) for n, p in self.matrices}
        self.first = {n: torch.zeros_like(p) for n, p in self.others}
        self.second = {n: torch.zeros_like(p) for n, p in self.others}

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply the gradients with all learning rates multiplied by `scale` (from the schedule, 0 to 1)."""
        self.num_steps += 1
        settings = self.settings
        groups: dict[torch.Size, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, weight in self.matrices:
            groups[weight.shape].append((name, weight))
        for shape, members in groups.items():
            updates = []
            for name, weight in members:
                assert weight.grad is not None
                momentum = self.momentum[name].lerp_(weight.grad, 1 - settings.momentum)
                updates.append(weight.grad.lerp(momentum, settings.momentum))  # Nesterov
            # The factor gives updates the same size for every matrix shape.
            rate = settings.matrix_lr * scale * max(1.0, shape[0] / shape[1]) ** 0.5
            for (_, weight), update in zip(members, orthogonalise(torch.stack(updates)), strict=True):
                weight.mul_(1 - settings.matrix_lr * scale * settings.weight_decay)
                weight.sub_(update, alpha=rate)
        beta1, beta2 = settings.betas
        for name, weight in self.others:
            assert weight.grad is not None
            first = self.first[name].lerp_(weight.grad, 1 - beta1)
            second = self.second[name].lerp_(weight.grad.square(), 1 - beta2)
            unbiased1 = first / (1 - beta1**self.num_steps)
            unbiased2 = second / (1 - beta2**self.num_steps)
            weight.sub_(unbiased1 / (unbiased2.sqrt() + 1e-8), alpha=settings.lr * scale)

    def state(self) -> dict[str, Tensor]:
        """Every state tensor by name; the checkpoint stores the step count separately."""
        named = {"momentum": self.momentum, "first": self.first, "second": self.second}
        return {f"{kind}.{name}": t for kind, tensors in named.items() for name, t in tensors.items()}

    def load(self, state: dict[str, Tensor], num_steps: int) -> None:
        """Load a state that `state` returned, and the step count."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.num_steps = num_steps
