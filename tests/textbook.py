"""The processed distribution as a textbook has it: plain Python, one number after the other. And two tests of fit."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from sameseed.request import SamplingParams


def adjusted(
    logits: Seq[float], params: SamplingParams, prompt: Seq[int], output: Seq[int], eos: Seq[int] = ()
) -> list[float]:
    """Logits after restrictions, bias and penalties, given everything written so far."""
    row = [float(x) for x in logits]
    for token in range(len(row)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = -math.inf
        if token in params.banned_token_ids:
            row[token] = -math.inf
        if len(output) < params.min_tokens and (token in eos or token in params.stop_token_ids):
            row[token] = -math.inf
        row[token] += params.logit_bias.get(token, 0.0)
        count = list(output).count(token)
        if token in output or token in prompt:
            repeat = params.repetition_penalty
            row[token] = row[token] / repeat if row[token] > 0 else row[token] * repeat
        row[token] -= params.frequency_penalty * count
        row[token] -= params.presence_penalty if count else 0.0
    return row


def probabilities(row: Seq[float], params: SamplingParams) -> list[float]:
    """The distribution that a token is drawn from, given adjusted logits; greedy is the limit of no temperature."""
    top = max(row)
    if params.temperature == 0.0:
        best = list(row).index(top)
        return [1.0 if t == best else 0.0 for t in range(len(row))]
    scaled = [(x - top) / params.temperature for x in row]
    if params.min_p > 0.0:
        scaled = [x if x >= math.log(params.min_p) else -math.inf for x in scaled]
    if params.top_k > 0:
        border = sorted(scaled, reverse=True)[min(params.top_k, len(scaled)) - 1]
        scaled = [x if x >= border else -math.inf for x in scaled]
    weights = [math.exp(x) for x in scaled]
    if params.top_p < 1.0:
        total, mass, kept = sum(weights), 0.0, set()
        for token in sorted(range(len(weights)), key=lambda t: (-weights[t], t)):
            if mass < params.top_p * total:
                kept.add(token)
                mass += weights[token]
        weights = [w if t in kept else 0.0 for t, w in enumerate(weights)]
    total = sum(weights)
    return [w / total for w in weights]


def chi_square_p(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """p-value of Pearson's test; cells with fewer than five expected draws are pooled. An impossible draw gives 0."""
    total = sum(counts.values())
    if any(expected.get(cell, 0.0) == 0.0 for cell in counts):
        return 0.0
    large = [c for c, p in expected.items() if p * total >= 5]
    observed = [counts.get(c, 0) for c in large]
    wanted = [expected[c] * total for c in large]
    rest = total - sum(wanted)
    if rest > 1e-6 * total:
        observed.append(total - sum(observed))
        wanted.append(rest)
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    half = torch.tensor([(len(wanted) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def kolmogorov_p(samples: torch.Tensor, cdf: torch.Tensor) -> float:
    """p-value of the Kolmogorov-Smirnov test of n samples whose distribution function at each of them is `cdf`."""
    n = len(samples)
    order = cdf[samples.argsort()]
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum((steps[1:] - order).max(), (order - steps[:-1]).max()))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    return min(1.0, 2 * sum((-1) ** (j - 1) * math.exp(-2 * j * j * x * x) for j in range(1, 101)))


def total_variation(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """Half the sum of differences between frequencies and probabilities."""
    total = sum(counts.values())
    cells = counts.keys() | expected.keys()
    return sum(abs(counts.get(c, 0) / total - expected.get(c, 0.0)) for c in cells) / 2
