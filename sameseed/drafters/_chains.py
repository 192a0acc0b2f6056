"""Draft chains written by a drafter's own model, one token per pass, for all sequences of a batch together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sameseed.drafters._choices import choices, growing_tree, grows_at_once
from sameseed.fields import within
from sameseed.models.drawn import Drawn
from sameseed.models.runner import ModelRunner, Output
from sameseed.request import Sequence
from sameseed.spec.draft import Draft, LateDraft
from sameseed.spec.drafter import Drafter, LengthPolicy
from sameseed.spec.sampling import FAILED, choose, drawable, drawer, plain_greedy, probability
from sameseed.spec.verify import on_host

log = logging.getLogger("sameseed")
MOST_SIBLINGS = 8  # leaves beside a chain token


class ChainDrafter(Drafter):
    """Base of drafters that write chains. With the option `siblings`, alternative tokens join a chain as leaves."""

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        """`siblings`: alternative tokens at each position of a chain, 0 to 8."""

        siblings: int = within(0, 0, MOST_SIBLINGS)

    judges = True
    _said = False

    def _heed_most(self, lengths: Seq[int], most: int) -> list[int]:
        """The lengths, at most `most`: what the model was trained to draft at once. The first longer one is logged."""
        beyond = next((k for k in lengths if k > most), None)
        if beyond is not None and not self._said:
            self._said = True
            log.warning(
                "drafter %r: was trained for %d tokens per pass, not %d; it drafts that many", self.name, most, beyond
            )
        return [min(k, most) for k in lengths]

    @classmethod
    def branches_with(cls, options: Drafter.Options) -> bool:
        assert isinstance(options, ChainDrafter.Options)
        return options.siblings > 0


@dataclass
class Chain:
    """A chain of draft tokens after a sequence: `sure` holds path probabilities, `ended` is true if it must not grow.

    `beside`: alternative tokens at each position, with the probabilities of the paths to them.
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
        """Append the first (token, probability) of `found`; the others become alternatives at that position.

        Returns False, and ends the chain, if that token is FAILED or not below `vocab_limit`.
        """
        (token, sure), *others = found
        if token == FAILED or token >= vocab_limit:
            self.ended = True
            return False
        before = self.sure[-1] if self.sure else 1.0
        self.tokens.append(token)
        self.sure.append(sure * before)
        able = ((t, p) for t, p in others if t < vocab_limit and p > 0.0 and p >= policy.least_probability)
        self.beside.append([(t, p * before) for t, p in able])
        self.ended = sure < policy.least_probability
        return True

    def take(self, tokens: Seq[int], parents: Seq[int], sure: Seq[float]) -> None:
        """Append the nodes of a tree, level by level: the first of each level, then its alternatives, all leaves."""
        level = None
        for token, parent, p in zip(tokens, parents, sure, strict=True):
            if parent == level:
                self.beside[-1].append((token, p))
                continue
            level = parent
            self.tokens.append(token)
            self.sure.append(p)
            self.beside.append([])

    def nodes(self, most: int) -> tuple[list[int], list[int], list[float]]:
        """The chain, and likeliest alternatives as leaves, up to `most` nodes: tokens, parents, path probabilities."""
        end = len(self.tokens)
        leaves = sorted((-p, i - 1, t) for i, others in enumerate(self.beside) for t, p in others)[: max(0, most - end)]
        parents = [*range(-1, end - 1), *(i for _, i, _ in leaves)]
        return [*self.tokens, *(t for *_, t in leaves)], parents, [*self.sure, *(-p for p, *_ in leaves)]


def chain_lengths(seqs: Seq[Sequence], num_draft: Seq[int], siblings: int) -> list[int]:
    """Chain lengths for drafts of num_draft[b] nodes, in which each chain token has `siblings` leaves beside it."""
    return [min(-(-k // (1 + siblings)), seq.draft_depth) for seq, k in zip(seqs, num_draft, strict=True)]


def draft_of(chains: Seq[Chain], num_nodes: Seq[int], with_confidence: bool, siblings: int = 0) -> Draft:
    """The chains as a Draft; with siblings as trees of at most num_nodes[b] nodes."""
    if not siblings:
        return Draft.chains([c.tokens for c in chains], [c.sure for c in chains] if with_confidence else None)
    trees = [c.nodes(n) for c, n in zip(chains, num_nodes, strict=True)]
    return Draft.trees([(tokens, parents) for tokens, parents, _ in trees], [sure for *_, sure in trees])


class ChainWriter:
    """Writes chains with a model, one token per pass, for all sequences of a batch together.

    A chain ends early if the policy says so, after a token that ends its text, at the model's context limit, and before
    a token id of `vocab_limit` or above. Confidence is that of the path to a token: the product of the tokens'
    probabilities up to there. The noise is the target's own (coupled sampling). With `siblings` each position gets
    alternative tokens. Each `shadow` is a sequence of the model that ends with its chain's tokens.
    """

    def __init__(self, runner: ModelRunner, policy: LengthPolicy, vocab_limit: int, siblings: int = 0) -> None:
        self.runner = runner
        self.policy = policy
        self.vocab_limit = vocab_limit
        self.siblings = siblings

    def draft(
        self, shadows: Mapping[int, Sequence], chains: Seq[Chain], lengths: Seq[int], num_nodes: Seq[int]
    ) -> Draft | LateDraft:
        """A draft of all sequences from their `chains`; those of sequences with shadows are extended before.

        The arguments are by index of the sequence; num_nodes[b]: the most nodes. If the device can choose the tokens,
        and the host need not see them before the target's pass, the result is a LateDraft, whose tokens the host has
        not read yet.
        """
        own, growing, most = list(shadows.values()), [chains[b] for b in shadows], [lengths[b] for b in shadows]

        def made() -> Draft:
            return draft_of(chains, num_nodes, self.policy.uses_confidence, self.siblings)

        unread = None
        if not self.policy.uses_confidence and not any(c.tokens for c in growing):
            unread = self._start(own, growing, most)
        if unread is None:
            self.extend(own, growing, most)
            return made()
        counts, owners = dict(zip(unread[0], unread[1].counts, strict=True)), list(shadows)

        def read(found: Seq[Seq[tuple[int, float]]]) -> Draft:
            self._take(own, growing, counts, found)
            return made()

        drafted = {owners[i]: count for i, count in counts.items()}
        return LateDraft([drafted.get(b, 0) for b in range(len(chains))], unread[1], read)

    def extend(
        self, shadows: Seq[Sequence], chains: Seq[Chain], lengths: Seq[int], going: Callable[[], bool] = lambda: True
    ) -> None:
        """Extend each of `chains` to at most lengths[b] tokens. No pass begins once `going()` is false."""
        runner, policy = self.runner, self.policy

        def wanted(b: int) -> bool:
            more = not chains[b].ended and len(chains[b].tokens) < lengths[b]
            return more and len(shadows[b]) < runner.model.max_model_len

        drawn = self._start(shadows, chains, lengths) if going() else None
        if drawn is not None:
            return self._take(shadows, chains, dict(zip(drawn[0], drawn[1].counts, strict=True)), drawn[1].read())
        active = [b for b in range(len(chains)) if wanted(b)]
        while active and going():
            running = [shadows[b] for b in active]
            num_pending, choosing = [s.num_pending for s in running], not self.siblings and not policy.uses_confidence
            out = runner.forward(running, Draft.empty(len(running)), num_pending, drawer=drawer if choosing else None)
            runner.commit(running, num_pending, [[] for _ in running], out)
            if not any(chains[b].tokens for b in active) and grows_at_once(running):
                some, counts = [chains[b] for b in active], [lengths[b] for b in active]
                if self._grow_at_once(running, some, counts, out.logits, going):
                    return
            for b, found in zip(active, self._next(running, out), strict=True):
                self._append(shadows[b], chains[b], found)
            active = [b for b in active if wanted(b)]
            if active and policy.ends([chains[b].sure for b in active]):
                break

    def _start(self, shadows: Seq[Sequence], chains: Seq[Chain], lengths: Seq[int]) -> tuple[list[int], Drawn] | None:
        """Like `extend`, but the host reads no token. Returns the growing chains' indices and what was drawn.

        `_take` takes over the result. None, with nothing written, if the host must wait for the model at each token.
        """
        if self.siblings or not self.runner.takes_late:
            return None
        most = self.runner.model.max_model_len
        room = [min(n - len(c.tokens), most - len(s)) for s, c, n in zip(shadows, chains, lengths, strict=True)]
        active = [b for b, chain in enumerate(chains) if not chain.ended and room[b] > 0]
        if not active:
            return None
        running = [shadows[b] for b in active]
        drawn = self.runner.draw(running, [room[b] for b in active], drawer, self.policy.uses_confidence)
        return None if drawn is None else (active, drawn)

    def _take(
        self, shadows: Seq[Sequence], chains: Seq[Chain], counts: Mapping[int, int], found: Seq[Seq[tuple[int, float]]]
    ) -> None:
        """Append what `_start` drew to the chains, up to each chain's end; `counts`: tokens drawn, by chain.

        `policy.ends` is not asked: it weighs the time of a drafting step, and these steps have already run.
        """
        for (b, count), tokens in zip(counts.items(), found, strict=True):
            shadow, chain = shadows[b], chains[b]
            del shadow.token_ids[len(shadow) - count :]
            for one in tokens:
                if chain.ended:
                    break
                self._append(shadow, chain, [one])
            self.runner.truncate(shadow, len(shadow) - 1)

    def _append(self, shadow: Sequence, chain: Chain, found: Seq[tuple[int, float]]) -> None:
        """Extend a chain and its shadow by what the model found at the next position (`Chain.grow`)."""
        if chain.grow(found, self.policy, self.vocab_limit):
            shadow.token_ids.append(chain.tokens[-1])
            chain.ended |= chain.tokens[-1] in shadow.params.ending(self.runner.model.config.eos_token_ids)

    def _next(self, seqs: Seq[Sequence], out: Output) -> list[list[tuple[int, float]]]:
        """Per sequence, (token, probability) of the model's choices after its last token, from the output of a pass."""
        choices, eos = out.choices, self.runner.model.config.eos_token_ids
        drawn = [choices is not None and drawable(s) for s in seqs]
        table = on_host(out.logits, Draft.empty(len(seqs)), out.wants_logits, drawn)
        return [
            [(choices[b], 1.0)]
            if choices is not None and drawn[b]
            else likely_after(table[b], s, [], eos, self.siblings, self.policy.uses_confidence)
            for b, s in enumerate(seqs)
        ]

    def _grow_at_once(
        self, shadows: Seq[Sequence], chains: Seq[Chain], lengths: Seq[int], logits: Tensor, going: Callable[[], bool]
    ) -> bool:
        """Write empty chains, with siblings, in one backend call, from the logits [B, V] after each sequence.

        Returns False, with nothing done, if the backend cannot do this.
        """
        runner, policy, least = self.runner, self.policy, self.policy.least_probability
        most, eos = runner.model.max_model_len, runner.model.config.eos_token_ids
        shape = {"width": 1, "count": 1 + self.siblings, "exact": True, "limit": self.vocab_limit, "least": least}
        trees = []
        for shadow, length in zip(shadows, lengths, strict=True):
            depth = min(length, most - len(shadow))
            own = {"size": depth * (1 + self.siblings), "num_cached": shadow.num_cached, "blocks": shadow.blocks}
            trees.append(growing_tree(shadow, depth, None, shadow.params.ending(eos), **shape, **own))
        grown = runner.grow(trees, shadows, logits, lambda paths: policy.ends(paths) or not going())
        if grown is None:
            return False
        for shadow, chain, tree in zip(shadows, chains, grown, strict=True):
            chain.take(*tree)
            before, *last = [1.0, *chain.sure][-2:]
            unsure = not last or last[0] < least * before
            chain.ended = unsure or chain.tokens[-1] in shadow.params.ending(eos)
            shadow.token_ids += chain.tokens
            shadow.num_cached += max(0, len(chain.tokens) - 1)  # the last token's row is computed in the next pass
        return True


def likely_after(
    row: NDArray[np.float32],
    seq: Sequence,
    path: Seq[int],
    eos_token_ids: Seq[int],
    siblings: int,
    with_probability: bool,
) -> list[tuple[int, float]]:
    """The choice after `path` from the logits [V] there, and `siblings` alternatives, with probabilities (1: unknown).

    With sampling, the probability that the target agrees is taken as the token's share of exp(log p + noise), not as p,
    because noise can lift a token of any p.
    """
    if siblings or (with_probability and not seq.params.greedy):
        return choices(row, seq, path, eos_token_ids, 1 + siblings) or [(FAILED, 0.0)]
    token = int(row.argmax()) if plain_greedy(seq) else choose(row, seq, path, eos_token_ids)
    return [(token, probability(row, seq, token) if with_probability and token != FAILED else 1.0)]
