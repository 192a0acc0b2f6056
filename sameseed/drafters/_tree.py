"""Tree: a draft tree that grows level by level and keeps its likeliest nodes (EAGLE-2: Li et al., 2024)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sameseed.batch import MAX_NODES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Tree:
    """Candidate nodes for the draft of one sequence, of which the `size` likeliest are wanted.

    A candidate's score is the sum of log-probabilities along its path. No node scores above its parent, so the n
    likeliest candidates form a tree. Expanded candidates, which were run through the drafter's model, have a place in
    the model's cache; the others have none. Ties go to the candidate that was added first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens: Ints = np.empty(0, np.int64)  # [n], like the next four arrays
        self.parents: Ints = np.empty(0, np.int64)  # index of the parent candidate, -1: the last known token
        self.rows: Ints = np.empty(0, np.int64)  # the parent's row in the arguments of `grow`
        self.scores: Floats = np.empty(0)
        self.ended: NDArray[np.bool_] = np.empty(0, np.bool_)  # true: no token may follow
        self.masks: dict[int, int] = {}  # expanded candidate -> cache places of itself and its ancestors, as a bit mask
        self._level = 0  # first candidate of the last level

    @property
    def num_places(self) -> int:
        """Number of expanded candidates, which is the cache place of the next one."""
        return len(self.masks)

    def grow(self, parents: ArrayLike, tokens: ArrayLike, log_probs: ArrayLike, ended: ArrayLike | None = None) -> None:
        """Add a level: tokens [n, w] with log-probabilities after each of `parents` [n] (-1: the last known token).

        Tokens of probability 0 are left out. `ended` [n, w]: true for tokens after which none may follow.
        """
        above, chances = np.asarray(parents, np.int64), np.asarray(log_probs, np.float64)
        base = self.scores[above][:, None] if above[0] >= 0 else 0.0
        scores = (chances + base).ravel()
        count = chances.shape[1]
        rows = np.arange(len(above)).repeat(count)
        ends = np.zeros(len(scores), np.bool_) if ended is None else np.asarray(ended, np.bool_).ravel()
        level = np.asarray(tokens, np.int64).ravel(), above.repeat(count), rows, scores, ends
        known = self.tokens, self.parents, self.rows, self.scores, self.ended
        self._level, able = len(self.tokens), scores > -np.inf
        self.tokens, self.parents, self.rows, self.scores, self.ended = (
            np.concatenate((old, new[able])) for old, new in zip(known, level, strict=True)
        )

    def expand(self, width: int) -> Ints:
        """At most `width` candidates of the last level to run next, the likeliest first; they get cache places.

        Candidates outside the `size` likeliest so far are not run, because their children could not be among them.
        """
        able = ~self.ended[self._level :]
        if len(self.tokens) > self.size:
            kept = self._likeliest()
            among = np.zeros(len(able), np.bool_)
            among[kept[kept >= self._level] - self._level] = True
            able &= among
        found = able.nonzero()[0] + self._level
        room = max(0, min(width, MAX_NODES - len(self.masks)))
        chosen: Ints = found[np.argsort(-self.scores[found], kind="stable")[:room]]
        for i, parent in zip(chosen.tolist(), self.parents[chosen].tolist(), strict=True):
            self.masks[i] = self.masks.get(parent, 0) | 1 << len(self.masks)
        return chosen

    def path(self, i: int) -> list[int]:
        """The candidates on the path from the first level to candidate i; empty for -1."""
        found = []
        while i >= 0:
            found.append(i)
            i = int(self.parents[i])
        return found[::-1]

    def chances(self) -> list[float]:
        """The path probability of every candidate."""
        found: list[float] = np.exp(self.scores).tolist()
        return found

    def _likeliest(self) -> Ints:
        """The `size` likeliest candidates in the order in which they were added, so parents come before children."""
        kept: Ints = np.argsort(-self.scores, kind="stable")[: self.size]
        kept.sort()
        return kept

    def best(self) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and path probabilities of the `size` likeliest candidates, parents before children."""
        kept = self._likeliest()
        parents = np.searchsorted(kept, self.parents[kept])
        parents[self.parents[kept] < 0] = -1
        return self.tokens[kept].tolist(), parents.tolist(), np.exp(self.scores[kept]).tolist()
