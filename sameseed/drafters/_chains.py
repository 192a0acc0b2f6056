"""Chains that a model writes, a pass a token, all sequences together: for drafters with a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

from sameseed.models.runner import ModelRunner
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import LengthPolicy
from sameseed.spec.sampling import FAILED, choose, plain_greedy, probability


@dataclass
class Chain:
    """Tokens guessed after a sequence, the probabilities of the paths to them, and whether there is no more to say."""

    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    ended: bool = False

    def cut(self, length: int) -> None:
        if length < len(self.tokens):
            del self.tokens[length:], self.sure[length:]
            self.ended = False


def write_chains(
    runner: ModelRunner,
    shadows: Seq[Sequence],
    num_draft: Seq[int],
    policy: LengthPolicy,
    vocab_limit: int,
    prepare: Callable[[Seq[Sequence]], None] | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Let the model go on after each of `shadows` for num_draft[b] tokens, which they keep; chains and confidence."""
    chains = [Chain() for _ in shadows]
    extend_chains(runner, shadows, chains, num_draft, policy, vocab_limit, prepare)
    return [c.tokens for c in chains], [c.sure for c in chains]


def extend_chains(
    runner: ModelRunner,
    shadows: Seq[Sequence],
    chains: Seq[Chain],
    lengths: Seq[int],
    policy: LengthPolicy,
    vocab_limit: int,
    prepare: Callable[[Seq[Sequence]], None] | None = None,
    going: Callable[[], bool] = lambda: True,
) -> None:
    """Let the model write on at each of `chains`, which its shadow ends with, up to lengths[b] tokens in all.

    Confidence is of whole paths: the product of the tokens' probabilities up to each.

    A chain ends early where `policy` says so, at the model's context, and before a token from `vocab_limit` on. The
    noise is the target's own (coupled sampling). `prepare(shadows)` runs before each pass. No pass begins once
    `going()` is false.
    """

    def wanted(b: int) -> bool:
        return not chains[b].ended and len(chains[b].tokens) < lengths[b]

    active = [b for b in range(len(chains)) if wanted(b) and len(shadows[b]) < runner.model.max_model_len]
    while active and going():
        running = [shadows[b] for b in active]
        if prepare is not None:
            prepare(running)
        for b, (token, sure) in zip(active, _next(runner, running, policy.uses_confidence), strict=True):
            chain = chains[b]
            if token == FAILED or token >= vocab_limit:
                chain.ended = True
                continue
            chain.tokens.append(token)
            chain.sure.append(sure * (chain.sure[-1] if chain.sure else 1.0))
            shadows[b].token_ids.append(token)
            chain.ended = policy.stop(sure)
        active = [b for b in active if wanted(b) and len(shadows[b]) < runner.model.max_model_len]
        if active and policy.ends([chains[b].sure for b in active]):
            break


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
