"""Tree: a draft that grows level by level and keeps its likeliest nodes (EAGLE-2: Li et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foretoken.batch import MAX_NODES


@dataclass
class Tree:
    """Candidates for the draft of one sequence, of which the `size` likeliest paths are wanted.

    A candidate's score is the sum of log-probabilities along its path, so no node beats its parent: the likeliest n
    candidates are a tree. Nodes that were expanded, which is to say run through the drafter's model, have a place in
    its cache; the others never will.
    """

    size: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)  # nothing comes after it
    places: dict[int, int] = field(default_factory=dict)  # expanded candidate -> its place in the cache
    _level: int = 0  # first candidate of the last level

    def start_level(self) -> None:
        """What `grow` adds from here on is one level deeper."""
        self._level = len(self.tokens)

    def grow(self, parent: int, tokens: Seq[int], log_probs: Seq[float], ended: Seq[bool]) -> None:
        """Add children of a candidate (-1: of the last known token) with their log-probabilities after it."""
        base = self.scores[parent] if parent >= 0 else 0.0
        for token, log_prob, end in zip(tokens, log_probs, ended, strict=True):
            if log_prob == -math.inf:
                continue
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(base + log_prob)
            self.ended.append(end)

    def expand(self, width: int) -> list[int]:
        """At most `width` candidates of the last level to be run next, the likeliest first; they get their places.

        One that is not among the `size` likeliest so far is not run: its children could not be either.
        """
        room = min(width, MAX_NODES - len(self.places))
        kept = set(self._likeliest()) if len(self.tokens) > self.size else None
        able = [i for i in range(self._level, len(self.tokens)) if not self.ended[i] and (kept is None or i in kept)]
        chosen = sorted(able, key=lambda i: (-self.scores[i], i))[: max(0, room)]
        for i in chosen:
            self.places[i] = len(self.places)
        return chosen

    def path(self, i: int) -> list[int]:
        """Candidates from the first level down to i."""
        found = [i]
        while self.parents[found[-1]] >= 0:
            found.append(self.parents[found[-1]])
        return found[::-1]

    def mask(self, i: int) -> int:
        """The cache places of an expanded candidate and its ancestors, as bits."""
        return sum(1 << self.places[j] for j in self.path(i))

    def _likeliest(self) -> list[int]:
        """The `size` likeliest candidates in order of growth: parents before their children."""
        ranked = sorted(range(len(self.tokens)), key=lambda i: (-self.scores[i], i))
        return sorted(ranked[: self.size])

    def best(self) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and path probabilities of the `size` likeliest candidates, parents first."""
        kept = self._likeliest()
        place = {i: n for n, i in enumerate(kept)}
        parents = [place[self.parents[i]] if self.parents[i] >= 0 else -1 for i in kept]
        return [self.tokens[i] for i in kept], parents, [math.exp(self.scores[i]) for i in kept]
