"""ScriptDrafter: trees of right and wrong guesses, for walking every branch of verification whatever the draft is."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence as Seq

from foretoken.request import Sequence
from foretoken.spec.draft import Draft
from foretoken.spec.drafter import Drafter

Answers = Callable[[Sequence], Seq[int]]
RIGHT, TWIN = 0.45, 0.15  # of nodes: the right path's next one; a second copy of another node


class ScriptDrafter(Drafter):
    """Random trees. `answer(seq)` is the right continuation; it hides among wrong tokens and second copies.

    What it guesses depends on its random state, not on the sequence alone: exactness must hold whatever it does.
    """

    def __init__(self, answer: Answers, vocab_size: int, seed: int = 0) -> None:
        self.answer = answer
        self.vocab_size = vocab_size
        self.random = random.Random(seed)

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
        return tokens, parents


def knowing(texts: Mapping[tuple[int, ...], Mapping[int, Seq[int]]]) -> Answers:
    """The known continuations by prompt and seed."""

    def answer(seq: Sequence) -> Seq[int]:
        known = texts.get(tuple(seq.token_ids[: seq.num_prompt]), {}).get(seq.seed, ())
        return known[seq.num_output :]

    return answer
