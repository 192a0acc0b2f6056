"""Draft chains written by a drafter's own model, one token per pass, for all sequences of a batch together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sameseed.drafters._choices import Choices, Guesses, choices, growing_tree, grows_at_once
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
        siblings: int = within(
            0,
            0,
            MOST_SIBLINGS,
            help="likely tokens beside each token of a chain, as leaves of a tree; --k counts nodes",
        )

    judges = True
    _said = False

    def _heed_most(self, lengths: Seq[int], most: int) -> list[int]:
        """The lengths, at most `most`: what the model was trained to draft at once. The first longer one is logged."""
        if not self._said and max(lengths, default=0) > most:
            self._said = True
            log.warning("drafter %r: was trained for %d tokens per pass, and drafts no more", self.name, most)
        return [min(k, most) for k in lengths]

    @classmethod
    def branches_with(cls, options: Drafter.Options) -> bool:
        assert isinstance(options, ChainDrafter.Options)
        return options.siblings > 0


@dataclass
class Chain:
    """A chain of draft tokens after a sequence: `sure` holds path probabilities, `ended` is true if it must not grow.

    `beside`: alternative tokens at each position, with their path probabilities.
    """

    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    ended: bool = False
    beside: list[list[tuple[int, float]]] = field(default_factory=list)

    def cut(self, length: int) -> None:
        if length < len(self.tokens):
            del self.tokens[length:], self.sure[length:], self.beside[length:]
            self.ended = False

    def extend(self, found: Iterable[Choices], least: float, vocab_limit: int, ending: Set[int]) -> None:
        """Append, position by position, the first (token, probability) found there; the others become alternatives.

        The chain ends before a token that is FAILED or not below `vocab_limit`, and after one that is less probable
        than `least` or of `ending`.
        """
        for (token, sure), *others in found:
            if token == FAILED or token >= vocab_limit:
                self.ended = True
                return
            before = self.sure[-1] if self.sure else 1.0
            self.tokens.append(token)
            self.sure.append(sure * before)
            self.beside.append([(t, p * before) for t, p in others if t < vocab_limit and p > 0.0 and p >= least])
            self.ended = sure < least or token in ending
            if self.ended:
                return

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


def lengthen(chain: Chain, guesses: Guesses, row: NDArray[np.float32], seq: Sequence, count: int, least: float) -> None:
    """Extend a chain by the likeliest `count` tokens, the first and its alternatives, by a head's logits [Vd] there."""
    tokens, shares = guesses.after(row[None], seq, [chain.tokens], count)
    found = [(t, p) for t, p in zip(tokens[0].tolist(), np.exp(shares[0]).tolist(), strict=True) if p > 0]
    chain.extend([found or [(FAILED, 0.0)]], least, guesses.vocab_size, seq.params.ending(guesses.eos_token_ids))


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
    a token id of `vocab_limit` or above. Confidence is the product of the tokens' probabilities up to there. The noise
    is the target's own (coupled sampling). With `siblings` each position gets alternative tokens. Each `shadow` is a
    sequence of the model that ends with its chain's tokens.
    """

    def __init__(self, runner: ModelRunner, policy: LengthPolicy, vocab_limit: int, siblings: int = 0) -> None:
        self.runner = runner
        self.policy = policy
        self.vocab_limit = vocab_limit
        self.siblings = siblings
        self._eos = runner.model.config.eos_token_ids

    def draft(
        self, shadows: Mapping[int, Sequence], chains: Seq[Chain], lengths: Seq[int], num_nodes: Seq[int]
    ) -> Draft | LateDraft:
        """A draft of all sequences from their `chains`; those of sequences with shadows are extended before.

        The arguments are by index of the sequence; num_nodes[b]: the most nodes. A LateDraft if the device can choose
        the tokens, and the host need not see them before the target's pass.
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
        active, drawn = unread

        def read(found: Seq[Choices]) -> Draft:
            self._take(own, growing, active, drawn.counts, found)
            return made()

        owners = list(shadows)
        return LateDraft.of(drawn, [owners[i] for i in active], len(chains), read)

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
            return self._take(shadows, chains, drawn[0], drawn[1].counts, drawn[1].read())
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
            find = reading(out, Draft.empty(len(running)), running, self._eos, self.siblings, policy.uses_confidence)
            for i, b in enumerate(active):
                self._extend(shadows[b], chains[b], [find(i, i, [])])
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
        self, shadows: Seq[Sequence], chains: Seq[Chain], active: Seq[int], counts: Seq[int], found: Seq[Choices]
    ) -> None:
        """Append what `_start` drew for the `active` chains, up to each chain's end; `counts`: tokens drawn.

        `policy.ends` is not asked: it weighs the time of a drafting step, and these steps have already run.
        """
        for b, count, tokens in zip(active, counts, found, strict=True):
            shadow = shadows[b]
            del shadow.token_ids[len(shadow) - count :]
            self._extend(shadow, chains[b], [[one] for one in tokens])
            self.runner.truncate(shadow, len(shadow) - 1)

    def _extend(self, shadow: Sequence, chain: Chain, found: Seq[Choices]) -> None:
        """Extend a chain and its shadow by what was found at the next positions, up to the chain's end."""
        before = len(chain.tokens)
        chain.extend(found, self.policy.least_probability, self.vocab_limit, shadow.params.ending(self._eos))
        shadow.token_ids += chain.tokens[before:]

    def _grow_at_once(
        self, shadows: Seq[Sequence], chains: Seq[Chain], lengths: Seq[int], logits: Tensor, going: Callable[[], bool]
    ) -> bool:
        """Write empty chains, with siblings, in one backend call from logits [B, V]; False, nothing done: it cannot."""
        runner, policy, least = self.runner, self.policy, self.policy.least_probability
        most, eos = runner.model.max_model_len, self._eos
        ids = None if runner.model.token_ids is None else runner.model.token_ids.cpu().numpy().astype(np.int32)
        # The native choice of exact chains takes its noise by row: of a reduced LM head these are no token ids.
        sampled = [s.params for s in shadows if not s.params.greedy]
        truncated = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in sampled)
        if ids is not None and sampled and (self.siblings or truncated):
            return False
        shape = {"width": 1, "count": 1 + self.siblings, "limit": self.vocab_limit, "least": least}
        trees = []
        for shadow, length in zip(shadows, lengths, strict=True):
            depth = min(length, most - len(shadow))
            own = {"size": depth * (1 + self.siblings), "num_cached": shadow.num_cached, "blocks": shadow.blocks}
            own["exact"] = ids is None or shadow.params.greedy
            trees.append(growing_tree(shadow, depth, ids, shadow.params.ending(eos), **shape, **own))
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


def reading(
    out: Output, draft: Draft, seqs: Seq[Sequence], eos_token_ids: Seq[int], siblings: int, with_probability: bool
) -> Callable[[int, int, Seq[int]], Choices]:
    """How to read a pass of a drafter's model over `draft`: (b, row, path) -> the choice after a path of sequence b.

    Where the backend has chosen the row's token, that one; else also `siblings` alternatives, with probabilities (1:
    unknown). With sampling, that is a token's share of exp(log p + noise), not p: noise can lift a token of any p.
    """
    made, drawn = out.choices, [out.choices is not None and drawable(s) for s in seqs]
    table = on_host(out.logits, draft, out.wants_logits, drawn)

    def find(b: int, row: int, path: Seq[int]) -> Choices:
        if made is not None and drawn[b]:
            return [(made[row], 1.0)]
        logits, seq = table[row], seqs[b]
        if siblings or (with_probability and not seq.params.greedy):
            return choices(logits, seq, path, eos_token_ids, 1 + siblings) or [(FAILED, 0.0)]
        token = int(logits.argmax()) if plain_greedy(seq) else choose(logits, seq, path, eos_token_ids)
        return [(token, probability(logits, seq, token) if with_probability and token != FAILED else 1.0)]

    return find
