"""TreeDrafter: trees of right and wrong tokens, for every branch of verification. Watched: counts a draft's hits."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sameseed.models.runner import ModelRunner, Nodes, Output
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter

Answers = Callable[[Sequence], Seq[int]]
RIGHT, TWIN = 0.45, 0.15  # share of nodes that continue the right path, and that copy another node


class TreeDrafter(Drafter):
    """Drafts random trees, in which the right continuation, `answer(seq)`, is hidden among wrong and duplicate tokens.

    The trees depend on the drafter's random state, not on the sequence alone: exactness must hold for any draft.
    """

    branches = True

    def __init__(self, answer: Answers, vocab_size: int, seed: int = 0) -> None:
        self.answer = answer
        self.vocab_size = vocab_size
        self.random = random.Random(seed)
        self.largest = 0  # nodes of the largest tree so far

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        return Draft.trees([self._tree(seq, k) for seq, k in zip(seqs, num_draft, strict=True)])

    def _tree(self, seq: Sequence, num_draft: int) -> tuple[list[int], list[int]]:
        rng, answer = self.random, list(self.answer(seq))
        tokens: list[int] = []
        parents: list[int] = []
        right = [-1]  # nodes of the right path, after the root
        for i in range(rng.randint(min(2, num_draft), num_draft)):
            depth, draw = len(right) - 1, rng.random()
            if depth < len(answer) and draw < RIGHT:
                parents.append(right[-1])
                tokens.append(answer[depth])
                right.append(i)
            elif tokens and draw < RIGHT + TWIN:
                twin = rng.randrange(len(tokens))
                parents.append(parents[twin])
                tokens.append(tokens[twin])
            else:
                parents.append(rng.randint(-1, i - 1))
                tokens.append(rng.randrange(self.vocab_size))
        self.largest = max(self.largest, len(tokens))
        return tokens, parents


def knowing(prompts: Seq[Seq[int]], texts: Seq[Seq[int]], seeds: Seq[int] | None = None) -> Answers:
    """A function that returns the rest of the known text of a sequence's prompt (and seed, where seeds are given)."""
    every = seeds or [0] * len(prompts)
    known = {(tuple(p), seed): tuple(text) for p, seed, text in zip(prompts, every, texts, strict=True)}

    def answer(seq: Sequence) -> Seq[int]:
        prompt = tuple(seq.token_ids[: seq.num_prompt])
        return known.get((prompt, seq.seed if seeds else 0), ())[seq.num_output :]

    return answer


@dataclass
class FirstDrafts:
    """Counts of first draft tokens: how often one was the target's token, and whether it was then accepted."""

    num: int = 0
    hits: int = 0
    by_chance: float = 0.0  # expected hits of drafts that ignore the position
    taken: int = 0  # rounds in which a first draft token was accepted
    missed: int = 0  # right first tokens that were not accepted
    wrong: int = 0  # first tokens that were accepted though none was right


class Watched(ModelRunner):
    """A runner that counts first draft tokens, and how many are accepted, against the texts that the target writes.

    `answer(seq)` is the right continuation. `share`: frequency of each token in those texts, which is the hit rate of a
    draft that ignores the position.
    """

    def __init__(self, runner: ModelRunner, answer: Answers, share: Mapping[int, float], counts: FirstDrafts) -> None:
        super().__init__(runner.model, runner.cache, runner.captures, runner.blocks)
        self.unseen = runner.unseen
        self.answer, self.share, self.counts = answer, share, counts
        self._right: dict[int, bool] = {}  # by index in the current pass: was a first draft token right?

    @property
    def takes_late(self) -> bool:
        """False: draft tokens are read before the pass, so they may not stay on the device."""
        return False

    def forward(self, seqs: Seq[Sequence], draft: Nodes, num_pending: Seq[int], *more: Any) -> Output:
        self._right = {}
        for b, seq in enumerate(seqs):
            tokens, parents = draft.nodes(b)
            first = {t for t, p in zip(tokens, parents, strict=True) if p < 0}
            truth = self.answer(seq)
            if first and truth:
                self._right[b] = truth[0] in first
                self.counts.num += 1
                self.counts.hits += self._right[b]
                self.counts.by_chance += sum(self.share.get(t, 0.0) for t in first)
        return super().forward(seqs, draft, num_pending, *more)

    def commit(self, seqs: Seq[Sequence], num_pending: Seq[int], nodes: Seq[Seq[int]], output: Output) -> Tensor | None:
        for b, right in self._right.items():
            self.counts.taken += bool(nodes[b])
            self.counts.missed += right and not nodes[b]
            self.counts.wrong += bool(nodes[b]) and not right
        return super().commit(seqs, num_pending, nodes, output)
