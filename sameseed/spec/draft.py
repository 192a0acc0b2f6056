"""Draft: draft tokens and their parents, ragged over sequences. A chain is a tree without branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sameseed import devices
from sameseed.batch import MAX_NODES
from sameseed.errors import ConfigError
from sameseed.models.drawn import Drawn, LateNodes

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Draft:
    """N nodes of B sequences: `tokens`, `parents` int32 [N], `offsets` int32 [B+1], `confidence` float32 [N] or None.

    A parent is an index among the same sequence's nodes, at most 64, before its child; -1 is the last known token.
    `confidence`: the drafter's probability of the whole path to a node, NaN if unknown; only length policies use it.
    `levels` int8 [N], for statistics: the index in `Drafter.level_names` of the level that drafted a node; None: 0.
    """

    tokens: Ints
    parents: Ints
    offsets: Ints
    confidence: NDArray[np.float32] | None = None
    levels: NDArray[np.int8] | None = None

    @classmethod
    @cache
    def empty(cls, num_seqs: int) -> Draft:
        """An empty draft for each of `num_seqs` sequences."""
        return cls.chains([[] for _ in range(num_seqs)])

    @classmethod
    def chains(
        cls, chains: Seq[Seq[int]], confidence: Seq[Seq[float]] | None = None, levels: Seq[Seq[int]] | None = None
    ) -> Draft:
        """One chain of tokens for each sequence."""
        return cls.trees([(c, range(-1, len(c) - 1)) for c in chains], confidence, levels)

    @classmethod
    def trees(
        cls,
        trees: Seq[tuple[Seq[int], Seq[int]]],
        confidence: Seq[Seq[float]] | None = None,
        levels: Seq[Seq[int]] | None = None,
    ) -> Draft:
        """A tree (tokens, parents) per sequence. Raises ConfigError for over 64 nodes or a parent after its child."""
        tokens: list[int] = []
        parents: list[int] = []
        offsets = [0]
        for node_tokens, node_parents in trees:
            if len(node_tokens) > MAX_NODES:
                raise ConfigError(f"a draft of {len(node_tokens)} nodes; at most {MAX_NODES} fit: lower the tree size")
            if any(not -1 <= p < i for i, p in enumerate(node_parents)):
                raise ConfigError(f"a draft's parents must come before their children, got {list(node_parents)}")
            tokens += node_tokens
            parents += node_parents
            offsets.append(len(tokens))
        flat = None if confidence is None else np.array([c for row in confidence for c in row], np.float32)
        by = None if levels is None else np.array([level for row in levels for level in row], np.int8)
        return cls(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(offsets, np.int32), flat, by)

    def read(self) -> Draft:
        """The draft itself: only a `LateDraft` must still be read."""
        return self

    @property
    def num_seqs(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> list[int]:
        """Number of nodes of each sequence."""
        if not len(self.tokens):
            return [0] * self.num_seqs
        return [end - begin for begin, end in pairwise(self.offsets.tolist())]

    def count(self, b: int) -> int:
        """Number of nodes of sequence b."""
        return int(self.offsets[b + 1] - self.offsets[b])

    def nodes(self, b: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of sequence b."""
        part = slice(self.offsets[b], self.offsets[b + 1])
        return self.tokens[part].tolist(), self.parents[part].tolist()

    def node_levels(self, b: int) -> list[int]:
        """The level that drafted each node of sequence b."""
        by = np.zeros(len(self.tokens), np.int8) if self.levels is None else self.levels
        return list(by[self.offsets[b] : self.offsets[b + 1]].tolist())

    def kept(self, keep: Seq[Seq[int] | None]) -> Draft:
        """The draft with only the nodes keep[b] of each sequence (ascending, parents included); None: all of them."""
        if all(chosen is None for chosen in keep):
            return self
        trees, index = list[tuple[Seq[int], Seq[int]]](), list[int]()
        for b, (chosen, begin) in enumerate(zip(keep, self.offsets.tolist())):
            tokens, parents = self.nodes(b)
            nodes = range(len(tokens)) if chosen is None else chosen
            place = {-1: -1, **{old: new for new, old in enumerate(nodes)}}
            trees.append(([tokens[i] for i in nodes], [place[parents[i]] for i in nodes]))
            index += [begin + i for i in nodes]
        sure = None if self.confidence is None else self.confidence[index]
        return replace(Draft.trees(trees), confidence=sure, levels=None if self.levels is None else self.levels[index])

    def useful(self, depths: Seq[int], ending: Seq[Set[int]]) -> Draft:
        """The draft without nodes that have depths[b] ancestors or more, or one of the tokens ending[b] among them."""
        keep: list[list[int] | None] = []
        for b, (most, last) in enumerate(zip(depths, ending, strict=True)):
            tokens, parents = self.nodes(b)
            above: list[int] = []  # the ancestors of each node; too many below a token that ends the text
            for parent in parents:
                ended = parent >= 0 and tokens[parent] in last
                above.append(most if ended else above[parent] + 1 if parent >= 0 else 0)
            fits = [i for i, a in enumerate(above) if a < most]
            keep.append(None if len(fits) == len(above) else fits)
        return self.kept(keep)

    def likeliest_chains(self) -> Draft:
        """The draft with one path of each tree: at each node its likeliest child, or the first where none is known."""
        keep: list[list[int] | None] = []
        for b in range(self.num_seqs):
            parents, path = self.nodes(b)[1], list[int]()
            sure = None if self.confidence is None else self.confidence[self.offsets[b] : self.offsets[b + 1]].tolist()
            while children := [i for i, parent in enumerate(parents) if parent == (path[-1] if path else -1)]:
                path.append(children[0] if sure is None else max(children, key=sure.__getitem__))
            keep.append(None if len(path) == len(parents) else path)
        return self.kept(keep)


@dataclass(frozen=True)
class LateDraft:
    """Chains that were drawn on the device and that the host has not read yet: counts[b] nodes of each sequence.

    `make(split)` makes the Draft from what `Drawn.split` returns; it may have fewer nodes.
    """

    counts: list[int]
    drawn: Drawn
    make: Callable[[Seq[Any]], Draft]

    @classmethod
    def of(cls, drawn: Drawn, owners: Seq[int], num_seqs: int, make: Callable[[Seq[Any]], Draft]) -> LateDraft:
        """The chains `drawn` for the sequences `owners` (indices) of `num_seqs`."""
        counts = dict(zip(owners, drawn.counts, strict=True))
        return cls([counts.get(b, 0) for b in range(num_seqs)], drawn, make)

    @property
    def nodes(self) -> LateNodes:
        """The unread nodes, as input of a pass."""
        return LateNodes(self.counts, self.drawn.numbers[0])

    def settle(self, numbers: Seq[Seq[int]]) -> Draft:
        """The draft, from the `numbers` that were read from `drawn.numbers`."""
        return self.make(self.drawn.split(numbers))

    def read(self) -> Draft:
        """Wait for the device, and return the draft."""
        return self.settle(devices.read(self.drawn.numbers))
