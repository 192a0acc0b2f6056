"""A1: draft tokens are accepted exactly when correct, and beat chance. L10: speculation leaves the target unchanged."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from sameseed.laws.check import TURNS, WARNING, Effort, Found, check
from sameseed.laws.subject import Subject
from sameseed.request import SamplingParams

LEAST_RATE = 0.01  # least share of correct first draft tokens: below it, drafting is broken or pointless
DEVIATIONS = 4.0  # standard deviations above chance that a useful draft reaches
CAUSES = (
    "a draft head trained for another target (or for the same one before it was tuned)",
    "a draft model whose tokenizer gives the same tokens other ids",
    "a wrong chat template: the prompts are not what the draft was trained on",
    "text that the draft knows nothing of (n-grams need repetition)",
)


@check(
    "A1",
    "zero-acceptance alarm",
    f"0 mismatches; at least {LEAST_RATE:.0%} of first drafts right, {DEVIATIONS:g} deviations above chance",
    least={"first_drafts": 50, "first_accepted": 5},
)
def alarm(subject: Subject, effort: Effort) -> Found:
    """The first draft token is accepted exactly when it is the target's token; otherwise the check fails.

    The draft is also right more often than chance; otherwise the check warns: a useless draft costs time, but never
    changes a token.
    """
    g = subject.first  # L3 and L6 counted these; where they saw too few, more greedy outputs are drafted
    while (g.num < effort.need(50) or g.taken < effort.need(5)) and subject.turn < TURNS:
        before = g.num
        jobs = subject.jobs(8, SamplingParams(max_tokens=subject.max_tokens, ignore_eos=True))
        plain, engine = subject.run(subject.plain(), jobs), subject.engine()
        subject.watch(engine, jobs, plain)
        subject.run(engine, jobs)
        subject.turn = subject.turn + 1 if g.num > before else TURNS
    subject.turn = 0
    rate = g.hits / g.num if g.num else 0.0
    chance = g.by_chance / g.num if g.num else 0.0
    deviation = math.sqrt(max(chance * (1 - chance), 1e-9) / max(g.num, 1))
    above = (rate - chance) / deviation
    found = Found(
        {"first_drafts": g.num, "right": g.hits, "first_accepted": g.taken},
        {"rate": round(rate, 4), "by_chance": round(chance, 4), "deviations_above_chance": round(above, 1)},
    )
    right, others = "first drafts that were the target's token", "first drafts that were not the target's token"
    found.wrong("mismatches", right, "all of them accepted", f"{g.missed} rejected", g.missed)
    found.wrong("mismatches", others, "none accepted", f"{g.wrong} accepted", g.wrong)
    if found.findings:
        return found
    if g.num and (rate < LEAST_RATE or above < DEVIATIONS):
        found.status = WARNING
        found.notes.append(
            f"{g.hits} of {g.num} first drafts were right ({rate:.1%}; {chance:.1%} would be by chance): "
            "the texts are right, but speculation cannot pay. Likely causes: " + "; ".join(CAUSES)
        )
    return found


def stored_tensors(weights: object, name: str = "weights") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under a model's weights with its path: codes and scales of matrices, norms, biases."""
    if isinstance(weights, Tensor):
        yield name, weights
    elif is_dataclass(weights):
        for part in fields(weights):
            yield from stored_tensors(getattr(weights, part.name), f"{name}.{part.name}")
    elif isinstance(weights, Mapping):
        for key in sorted(weights):
            yield from stored_tensors(weights[key], f"{name}.{key}")
    elif isinstance(weights, tuple | list):
        for i, part in enumerate(weights):
            yield from stored_tensors(part, f"{name}.{i}")


def weights_digest(subject: Subject) -> str:
    """First 16 hex digits of a SHA-256 over every stored tensor of the target: path, dtype, shape and bytes."""
    found = hashlib.sha256()
    for name, tensor in stored_tensors(subject.target.weights):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


@check("L10", "the quantized target is the target", "0 changed digests", least={"matrices": 1, "tensors": 1})
def own_target(subject: Subject, effort: Effort) -> Found:
    """Plain and speculative decoding use one set of weights in one format, and speculation does not change them."""
    matrices = subject.target.weights.matrices
    formats = sorted({m.format + ("" if m.activations is None else f" with {m.activations}") for m in matrices})
    tensors = sum(1 for _ in stored_tensors(subject.target.weights))
    found = Found({"matrices": len(matrices), "tensors": tensors}, {"changed_digests": 0})
    before, after = subject.digest, weights_digest(subject)
    found.wrong("changed_digests", "digest of the target's weights", before, after, bool(before) and before != after)
    other = subject.engine().runner.model is not subject.plain().runner.model
    if other:
        found.add("the model behind plain and speculative decoding", "one", "two")
    found.notes.append(
        f"the target is the model as loaded, weights in {', '.join(formats)}: texts are proved equal to those of "
        "these weights alone, not to those of a checkpoint in more bits"
    )
    return found
