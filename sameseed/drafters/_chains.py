"""Chains that a model writes, a pass a token, all sequences together: for drafters with a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sameseed.errors import ConfigError
from sameseed.models.runner import ModelRunner
from sameseed.request import Sequence
from sameseed.spec.choices import choices
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, LengthPolicy
from sameseed.spec.sampling import FAILED, choose, drawable, drawer, plain_greedy, probability
from sameseed.spec.verify import on_host

MOST_SIBLINGS = 8  # leaves beside a token


class ChainDrafter(Drafter):
    """Base of drafters that write chains, with leaves beside them where the option `siblings` asks for some."""

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        """`siblings`: other tokens at each place of a chain, 0 to 8. Raises ConfigError for other numbers."""

        siblings: int = 0

        def __post_init__(self) -> None:
            if not 0 <= self.siblings <= MOST_SIBLINGS:
                raise ConfigError(f"siblings must lie in 0..{MOST_SIBLINGS}, got {self.siblings}")

    cuttable = True
    judges = True

    @classmethod
    def branches_with(cls, options: Drafter.Options) -> bool:
        assert isinstance(options, ChainDrafter.Options)
        return options.siblings > 0


@dataclass
class Chain:
    """Tokens guessed after a sequence, the probabilities of the paths to them, and whether there is no more to say.

    `beside`: at each place other tokens, likely in its stead, with the probabilities of the paths to them.
    """

    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    ended: bool = False
    beside: list[list[tuple[int, float]]] = field(default_factory=list)

    def cut(self, length: int) -> None:
        if length < len(self.tokens):
            del self.tokens[length:], self.sure[length:], self.beside[length:]
            self.ended = False

    def grow(self, found: Seq[tuple[int, float]], policy: LengthPolicy, vocab_limit: int) -> bool:
        """Take over what the model found at the next place; False where the chain has ended before it."""
        (token, sure), *others = found
        if token == FAILED or token >= vocab_limit:
            self.ended = True
            return False
        before = self.sure[-1] if self.sure else 1.0
        self.tokens.append(token)
        self.sure.append(sure * before)
        self.beside.append([(t, p * before) for t, p in others if t < vocab_limit and not policy.stop(p)])
        self.ended = policy.stop(sure)
        return True

    def nodes(self, most: int) -> tuple[list[int], list[int], list[float]]:
        """A tree of at most so many nodes: tokens, parents, probabilities of paths. The likeliest leaves are taken."""
        end = len(self.tokens)
        leaves = sorted((-p, i - 1, t) for i, others in enumerate(self.beside) for t, p in others)[: max(0, most - end)]
        parents = [*range(-1, end - 1), *(i for _, i, _ in leaves)]
        return [*self.tokens, *(t for *_, t in leaves)], parents, [*self.sure, *(-p for p, *_ in leaves)]


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


def chain_lengths(seqs: Seq[Sequence], num_draft: Seq[int], siblings: int) -> list[int]:
    """The tokens of each sequence's chain for a draft of num_draft[b] nodes: each brings its leaves."""
    return [min(-(-k // (1 + siblings)), seq.draft_depth) for seq, k in zip(seqs, num_draft, strict=True)]


def draft_of(chains: Seq[Chain], num_nodes: Seq[int], with_confidence: bool, siblings: int = 0) -> Draft:
    """The chains as a Draft; with siblings as trees of at most num_nodes[b] nodes."""
    if not siblings:
        return Draft.chains([c.tokens for c in chains], [c.sure for c in chains] if with_confidence else None)
    trees = [c.nodes(n) for c, n in zip(chains, num_nodes, strict=True)]
    return Draft.trees([(tokens, parents) for tokens, parents, _ in trees], [sure for *_, sure in trees])


def extend_chains(
    runner: ModelRunner,
    shadows: Seq[Sequence],
    chains: Seq[Chain],
    lengths: Seq[int],
    policy: LengthPolicy,
    vocab_limit: int,
    prepare: Callable[[Seq[Sequence]], None] | None = None,
    going: Callable[[], bool] = lambda: True,
    siblings: int = 0,
) -> None:
    """Let the model write on at each of `chains`, which its shadow ends with, up to lengths[b] tokens in all.

    Confidence is of whole paths: the product of the tokens' probabilities up to each.

    A chain ends early where `policy` says so, with a token that ends its text, at the model's context, and before a
    token from `vocab_limit` on. The noise is the target's own (coupled sampling). With `siblings` each place gets
    others beside its token. `prepare(shadows)` runs before each pass. No pass begins once `going()` is false.
    """

    def wanted(b: int) -> bool:
        return not chains[b].ended and len(chains[b].tokens) < lengths[b]

    active = [b for b in range(len(chains)) if wanted(b) and len(shadows[b]) < runner.model.max_model_len]
    while active and going():
        running = [shadows[b] for b in active]
        if prepare is not None:
            prepare(running)
        for b, found in zip(active, _next(runner, running, policy.uses_confidence, siblings), strict=True):
            if chains[b].grow(found, policy, vocab_limit):
                token = chains[b].tokens[-1]
                shadows[b].token_ids.append(token)
                chains[b].ended |= token in shadows[b].params.ending(runner.model.config.eos_token_ids)
        active = [b for b in active if wanted(b) and len(shadows[b]) < runner.model.max_model_len]
        if active and policy.ends([chains[b].sure for b in active]):
            break


def _next(
    runner: ModelRunner, seqs: list[Sequence], with_probability: bool, siblings: int
) -> list[list[tuple[int, float]]]:
    """One pass: the model's choices after each sequence's last token."""
    num_pending = [s.num_pending for s in seqs]
    nobody, alone = Draft.empty(len(seqs)), not siblings and not with_probability
    out = runner.forward(seqs, nobody, num_pending, drawer=drawer if alone else None)
    runner.commit(seqs, num_pending, [[] for _ in seqs], out)
    drawn = [out.choices is not None and drawable(s) for s in seqs]
    table = on_host(out.logits, nobody, out.wants_logits, drawn)
    eos = runner.model.config.eos_token_ids
    return [
        [(out.choices[b], 1.0)]
        if out.choices is not None and drawn[b]
        else likely_after(table[b], s, [], eos, siblings, with_probability)
        for b, s in enumerate(seqs)
    ]


def likely_after(
    row: NDArray[np.float32],
    seq: Sequence,
    path: Seq[int],
    eos_token_ids: Seq[int],
    siblings: int,
    with_probability: bool,
) -> list[tuple[int, float]]:
    """The choice after `path` by logits [V] there, and `siblings` others, with probabilities (1: nobody asks).

    Sampled, what says how likely the target agrees is the share of log p + noise: noise lifts tokens of any p.
    """
    if siblings or (with_probability and not seq.params.greedy):
        return choices(row, seq, path, eos_token_ids, 1 + siblings) or [(FAILED, 0.0)]
    token = int(row.argmax()) if plain_greedy(seq) else choose(row, seq, path, eos_token_ids)
    return [(token, probability(row, seq, token) if with_probability and token != FAILED else 1.0)]
