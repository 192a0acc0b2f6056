"""Bit budgets: measure the loss of each part of a model in each scheme, and choose the best schemes within a budget.

A unit is the linear layers that share one input (q, k and v; o; gate and up; down). They get the same scheme, so that
they stay one matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.quantize import check_stored
from sameseed.quantize._decoder import STAGES, Block, Linear
from sameseed.quantize._walk import Walk
from sameseed.scheme import QuantScheme

CANDIDATES = ("w4a16", "w4a16-g32", "w8a16", "bf16")
STEPS = 20_000  # of the spare budget, in the knapsack


@dataclass(frozen=True)
class Sensitivity:
    """The loss where only `unit` is stored in `scheme`: KL(original || changed) in nats per token on held-out rows."""

    unit: str  # glob-free common name, e.g. model.layers.0.qkv
    modules: tuple[str, ...]
    scheme: str
    bits: float
    num_weights: int
    loss: float


@dataclass(frozen=True)
class Assignment:
    """A scheme for every unit: `chosen` by unit, the average bits per weight, and the sum of the units' losses."""

    chosen: Mapping[str, Sensitivity]
    bits: float
    predicted_loss: float

    @property
    def rules(self) -> tuple[tuple[str, QuantScheme], ...]:
        """The assignment as rules of a QuantScheme, one per module."""
        return tuple((m, QuantScheme.parse(s.scheme)) for s in self.chosen.values() for m in s.modules)


def offered(modules: Seq[str], scheme: QuantScheme, candidates: Seq[str]) -> list[QuantScheme]:
    """The schemes that a unit may be stored in: the candidates, or only that of the rule of `scheme` that names it.

    Raises ConfigError where rules treat the modules of one unit differently.
    """
    ruled = {next((s for glob, s in scheme.rules if fnmatchcase(m, glob)), None) for m in modules}
    if len(ruled) > 1:
        raise ConfigError(
            f"under a budget {', '.join(modules)} are stored alike, and rules of the scheme name only some of them, or "
            "name them differently; write one rule that fits them all, or none"
        )
    only = ruled.pop()
    return [QuantScheme.parse(c) for c in candidates] if only is None else [only]


def check_budget(shapes: Mapping[str, tuple[int, int]], plan: QuantScheme, candidates: Seq[str], budget: float) -> None:
    """Raise ConfigError, before anything is measured, where a budget cannot be met.

    `shapes`: of every linear layer by its name; `plan`: the scheme whose rules take precedence over the candidates.
    """
    least, layers = 0.0, dict.fromkeys(".".join(name.split(".")[:3]) for name in shapes)  # model.layers.0, ...
    for prefix, names in product(layers, STAGES.values()):
        modules, sizes = [f"{prefix}.{name}" for name in names], []
        for scheme in offered(modules, plan, candidates):
            for m in modules:
                check_stored(m, shapes[m], scheme)
            sizes.append(sum(math.prod(shapes[m]) * scheme.bits_per_weight(shapes[m][1]) for m in modules))
        least += min(sizes)
    least /= sum(map(math.prod, shapes.values()))
    if budget < least:
        raise ConfigError(
            f"a budget of {budget:g} bits a weight is below the smallest candidates' {least:.3f} (modules that rules "
            "name counted by these); raise it, or add candidates of fewer bits"
        )


def measure(
    walk: Walk,
    ends: tuple[Tensor, Linear],
    schemes_of: Callable[[Seq[str]], Seq[QuantScheme]],
    report: Callable[[int, int], None],
) -> list[Sensitivity]:
    """Sensitivities of every unit, rounded to nearest, over the rows in `walk.hidden` [B, S, C].

    `schemes_of`: the schemes to try for a unit, by its modules (see `offered`). `ends`: the last norm and the LM head.
    A layer is read again for every layer before it. Memory holds the hidden states of one layer's units in all schemes.
    """
    assert walk.hidden is not None
    num_layers = walk.config.num_layers
    start = walk.hidden
    final = start.clone()
    for index in range(num_layers):
        walk.advance(walk.decoder.layer, walk.prepared(index), final)
    entering = start.clone()
    found: list[Sensitivity] = []
    for index in range(num_layers):
        block = walk.prepared(index)
        units = {stage: [block.prefix + n for n in names] for stage, names in STAGES.items()}
        trials = [_trial(block, stage, s) for stage, modules in units.items() for s in schemes_of(modules)]
        hidden = [entering.clone() for _ in trials]
        for (_, trial), h in zip(trials, hidden, strict=True):
            walk.advance(walk.decoder.layer, trial, h)
        for later in range(index + 1, num_layers):
            following = walk.prepared(later)
            for h in hidden:
                walk.advance(walk.decoder.layer, following, h)
        for (partly, _), h in zip(trials, hidden, strict=True):
            found.append(partly(loss=divergence(walk, ends, final, h)))
        walk.advance(walk.decoder.layer, block, entering)
        report(index + 1, num_layers)
    return found


def _trial(block: Block, stage: str, scheme: QuantScheme) -> tuple[Callable[..., Sensitivity], Block]:
    """A constructor of the Sensitivity that still takes `loss`, and the layer with one unit stored in `scheme`."""
    trial = block.copy()
    count, bits = 0, 0.0
    for name in STAGES[stage]:
        weight = block.linears[name].weight
        trial.linears[name].store(scheme.encode(weight))
        count += weight.numel()
        bits += weight.numel() * scheme.bits_per_weight(weight.shape[1])
    modules = tuple(block.prefix + n for n in STAGES[stage])
    make = partial(Sensitivity, f"{block.prefix}{stage}", modules, str(scheme), bits=bits / count, num_weights=count)
    return make, trial


def divergence(walk: Walk, ends: tuple[Tensor, Linear], before: Tensor, after: Tensor) -> float:
    """KL divergence, in nats per token, between the output distributions of two hidden states [B, S, C], in chunks."""
    norm, head = ends
    total, count = 0.0, 0
    for a, b in zip(walk.parts(before), walk.parts(after), strict=True):
        for x, y in zip(torch.split(a.flatten(0, 1), 1024), torch.split(b.flatten(0, 1), 1024), strict=True):
            p, q = (F.log_softmax(head(walk.decoder.norm(h, norm)), -1) for h in (x, y))
            total += float(F.kl_div(q, p, reduction="sum", log_target=True))
            count += len(x)
    return max(total / count, 0.0)


def assign(sensitivities: Seq[Sensitivity], budget: float) -> Assignment:
    """The assignment of least predicted loss within `budget` bits per weight, which has passed `check_budget`.

    A multiple-choice knapsack: bits beyond a unit's smallest choice are counted in steps of 1/20000 of the spare
    budget, rounded up.
    """
    units: dict[str, list[Sensitivity]] = {}
    for s in sensitivities:
        units.setdefault(s.unit, []).append(s)
    weights = sum(choices[0].num_weights for choices in units.values())
    smallest = {unit: min(s.bits * s.num_weights for s in choices) for unit, choices in units.items()}
    spare = budget * weights - sum(smallest.values())

    def cost(s: Sensitivity) -> int:
        more = s.bits * s.num_weights - smallest[s.unit]
        return 0 if more <= 0 else min(math.ceil(more / spare * STEPS), STEPS + 1) if spare > 0 else STEPS + 1

    best = torch.zeros(STEPS + 1, dtype=torch.float64)  # least loss by number of steps
    picks = []
    for choices in units.values():
        options = torch.full((len(choices), STEPS + 1), torch.inf, dtype=torch.float64)
        for i, s in enumerate(choices):
            steps = cost(s)
            if steps <= STEPS:
                options[i, steps:] = best[: STEPS + 1 - steps] + s.loss
        best, pick = options.min(0)
        picks.append(pick)
    left, chosen = STEPS, {}
    for unit, pick in zip(reversed(units), reversed(picks), strict=True):
        chosen[unit] = s = units[unit][int(pick[left])]
        left -= cost(s)
    chosen = dict(reversed(chosen.items()))
    total = sum(s.bits * s.num_weights for s in chosen.values())
    return Assignment(chosen, total / weights, sum(s.loss for s in chosen.values()))


@dataclass(frozen=True)
class BitAdvice:
    """A part to keep in higher precision: its share of the whole loss (or error), and its share of the weights."""

    modules: tuple[str, ...]
    share: float
    of_weights: float
    reason: str


def recommend(quantization: Mapping[str, Any]) -> list[BitAdvice]:
    """The parts of a quantized model to keep in higher precision, from its `quantization.json`: those that lose most.

    With measured sensitivities: parts whose share of the loss is at least twice their share of the weights. Without:
    modules whose relative output error is at least 1.5 times the median. The worst come first, at most five.
    """
    modules, found = quantization["modules"], []
    if measured := quantization.get("sensitivity"):
        stored = {m["module"]: m["scheme"] for m in modules}
        parts = [s for s in measured if stored.get(s["modules"][0]) == s["scheme"]]
        whole, weights = sum(s["loss"] for s in parts), sum(s["num_weights"] for s in parts)
        for s in parts if whole > 0 else []:
            share, of_weights = s["loss"] / whole, s["num_weights"] / weights
            if share >= 2 * of_weights:
                reason = f"{share:.0%} of the loss in {of_weights:.1%} of the weights"
                found.append(BitAdvice(tuple(s["modules"]), share, of_weights, reason))
    elif parts := [m for m in modules if m["relative"] > 0]:
        usual = median(m["relative"] for m in parts)
        whole, weights = sum(m["relative"] ** 2 for m in parts), sum(m["num_weights"] for m in modules)
        for m in parts:
            if m["relative"] >= 1.5 * usual:
                reason = f"its output is off by {m['relative']:.1%}, the median module's by {usual:.1%}"
                share, of_weights = m["relative"] ** 2 / whole, m["num_weights"] / weights
                found.append(BitAdvice((m["module"],), share, of_weights, reason))
    return sorted(found, key=lambda a: (-a.share, a.modules))[:5]
