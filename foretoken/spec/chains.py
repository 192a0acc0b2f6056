"""Chains that a model writes, a pass a token, all sequences together: for drafters with a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from foretoken.models.runner import ModelRunner
from foretoken.request import Sequence
from foretoken.spec.draft import Draft
from foretoken.spec.length import LengthPolicy
from foretoken.spec.sampling import FAILED, choose, plain_greedy, probability


def write_chains(
    runner: ModelRunner,
    shadows: Seq[Sequence],
    num_draft: Seq[int],
    policy: LengthPolicy,
    vocab_limit: int,
    prepare: Callable[[Seq[Sequence]], None] | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Let the model go on after each of `shadows` for num_draft[b] tokens, which they keep; chains and confidence.

    Confidence is of whole paths: the product of the tokens' probabilities up to each.

    A chain ends early where `policy` says so, at the model's context, and before a token from `vocab_limit` on. The
    noise is the target's own (coupled sampling). `prepare(shadows)` runs before each pass.
    """
    chains: list[list[int]] = [[] for _ in shadows]
    confidence: list[list[float]] = [[] for _ in shadows]
    active = [b for b, k in enumerate(num_draft) if k > 0]
    while active:
        running = [shadows[b] for b in active]
        if prepare is not None:
            prepare(running)
        going: list[int] = []
        for b, (token, sure) in zip(active, _next(runner, running, policy.uses_confidence), strict=True):
            if token == FAILED or token >= vocab_limit:
                continue
            chains[b].append(token)
            path = sure * (confidence[b][-1] if confidence[b] else 1.0)
            confidence[b].append(path)
            shadows[b].token_ids.append(token)
            more = len(chains[b]) < num_draft[b] and len(shadows[b]) < runner.model.max_model_len
            if more and not policy.stop(sure):
                going.append(b)
        active = [] if going and policy.ends([confidence[b] for b in going]) else going
    return chains, confidence


def _next(runner: ModelRunner, seqs: list[Sequence], with_probability: bool) -> list[tuple[int, float]]:
    """One pass: the model's choice after each sequence's last token, and its probability where it is asked for."""
    num_pending = [s.num_pending for s in seqs]
    out = runner.forward(seqs, Draft.empty(len(seqs)), num_pending)
    runner.commit(seqs, num_pending, [[] for _ in seqs], out)
    table = out.logits.numpy() if out.logits.device.type == "cpu" else out.logits.cpu().numpy()
    best: list[int] = table.argmax(axis=-1).tolist() if any(plain_greedy(s) for s in seqs) else []
    eos = runner.model.config.eos_token_ids
    guesses: list[tuple[int, float]] = []
    for b, seq in enumerate(seqs):
        token = best[b] if plain_greedy(seq) else choose(table[b], seq, [], eos)
        sure = probability(table[b], seq, token) if with_probability and token != FAILED else 1.0
        guesses.append((token, sure))
    return guesses
