"""eagle drafter: a head reads the target's own hidden states and drafts a tree (EAGLE-2 and 3: Li et al., 2024, 2025).

Level by level the likeliest paths are expanded, all nodes of a level in one pass of the head, and the likeliest nodes
overall are kept: by the head's log-probabilities and, with sampling, the target's own noise (coupled sampling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sameseed import devices
from sameseed.batch import GREEDY, MAX_NODES, Draw
from sameseed.drafters._chains import Chain
from sameseed.drafters._choices import growing_tree, grows_at_once
from sameseed.drafters._eagle_context import Reading
from sameseed.errors import ConfigError
from sameseed.fields import setting, within
from sameseed.models.drawn import Drawn
from sameseed.models.eagle import TreeLevel
from sameseed.request import Sequence
from sameseed.spec.draft import Draft, LateDraft
from sameseed.spec.drafter import Drafter, Parts
from sameseed.spec.sampling import drawable, drawer


class EagleDrafter(Reading):
    """An EAGLE head with its own format and cache, which follows each sequence by the target's hidden states."""

    @dataclass(frozen=True)
    class Options(Reading.Options):
        depth: int = within(5, 1, MAX_NODES, help="the longest path of a tree; --k sets how many nodes are kept")
        top_k: int = within(8, 1, MAX_NODES, help="nodes expanded per level, and children of each (1: a chain)")
        beyond: str = setting(
            "slide", "past the head's own context: slide moves its attention window along, stop ends drafting"
        )
        window: int = within(0, 0, help="the most tokens that the head attends to (0: its own context)")

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.beyond not in ("slide", "stop"):
                raise ConfigError(f"beyond must be 'slide' or 'stop', got {self.beyond!r}")

    judges = True

    def __init__(self, options: Options, parts: Parts) -> None:
        super().__init__(options, parts)
        head = self.runner.model
        own = min(options.window or head.config.layer.max_model_len, head.config.layer.max_model_len)
        if options.beyond == "stop":
            self.followers.limit = min(own, head.max_model_len)
        elif own < head.max_model_len:
            self.runner.window = own

    @classmethod
    def branches_with(cls, options: Drafter.Options) -> bool:
        assert isinstance(options, cls.Options)
        return options.top_k > 1

    @property
    def limit(self) -> int | None:
        # Row t holds token t + 1, and the draft token after the last known token needs no row of its own.
        return self.followers.limit + 2 if self.options.beyond == "stop" else None

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft | LateDraft:
        """Trees of at most num_draft[b] nodes for all sequences together; confidence holds path probabilities."""
        depths = [min(self.options.depth, k, seq.draft_depth) for seq, k in zip(seqs, num_draft, strict=True)]
        widths = [min(self.options.top_k, k) for k in num_draft]
        growing: dict[int, _Tree] = {}
        with self.followers.drafting(seqs, depths, lambda b, depth: min(widths[b] * (depth - 1), MAX_NODES)) as ready:
            for b, depth in ready.items():
                ending = seqs[b].params.ending(self.guesses.eos_token_ids)
                growing[b] = _Tree(seqs[b], min(num_draft[b], MAX_NODES), depth, widths[b], ending)
            own = list(growing.values())
            drawn = self._grow(own) if own else None

        def made() -> Draft:
            trees = [growing[b].best() if b in growing else ([], [], []) for b in range(len(seqs))]
            return Draft.trees([(tokens, parents) for tokens, parents, _ in trees], [sure for *_, sure in trees])

        if drawn is None:
            return made()

        def read(found: Seq[Seq[tuple[int, float]]]) -> Draft:
            self._take(own, found)
            return made()

        return LateDraft.of(drawn, list(growing), len(seqs), read)

    def _grow(self, growing: Seq[_Tree]) -> Drawn | None:
        """Grow all trees. Returns the tokens of chains that the device drew and the host has not read, or None."""

        def draws(b: int, depth: int) -> Draw:
            return drawer(growing[b].seq, depth) or GREEDY

        unread = not self.branches and all(drawable(g.seq) for g in growing)
        first = [draws(b, 0) for b in range(len(growing))] if unread else None
        logits, features, chosen = self.followers.last([g.seq for g in growing], first)
        if chosen is not None:
            holders, counts = [self.followers[g.seq].holder for g in growing], [g.depth for g in growing]
            drawn: Drawn | None = self.runner.draw(holders, counts, chosen, features, draws)
            if drawn is not None and not self.policy.uses_confidence:
                return drawn
            if drawn is not None:
                self._take(growing, drawn.read())
                return None
        if not self._grow_at_once(growing, logits, features):
            self._grow_by_level(growing, logits, features)
        return None

    def _grow_by_level(self, growing: Seq[_Tree], logits: Tensor, features: Tensor) -> None:
        """Grow trees: the first level from the rows of known positions, then one pass of the head per level."""
        rows = self.guesses.rows(logits)
        for i, g in enumerate(growing):
            g.first = i
            self._children(g, [-1], rows)
        for depth in range(1, max(g.depth for g in growing)):
            levels: list[TreeLevel] = []
            parents: list[int] = []  # rows of `features`
            running: list[tuple[_Tree, list[int]]] = []
            num_rows = 0
            for g in growing:
                place, chosen = len(g.masks), g.expand() if depth < g.depth else []
                if not chosen:
                    continue
                tokens, masks = [g.nodes[n].token for n in chosen], [g.masks[n] for n in chosen]
                levels.append(TreeLevel(self.followers[g.seq].holder, tokens, masks, place))
                parents += [g.first + g.nodes[n].row for n in chosen]
                running.append((g, chosen))
                g.first, num_rows = num_rows, num_rows + len(chosen)
            if not running:
                return
            if not self.branches and self.policy.ends([[math.exp(n.score) for n in g.nodes] for g, _ in running]):
                return
            index = devices.put(torch.tensor(parents, device="cpu"), features.device)
            logits, features = self.runner.expand(levels, features.index_select(0, index))
            rows = self.guesses.rows(logits)
            for g, chosen in running:
                self._children(g, chosen, rows)

    def _grow_at_once(self, growing: Seq[_Tree], logits: Tensor, features: Tensor) -> bool:
        """Grow whole trees or chains in one native call; False if that is impossible, with nothing done.

        `logits`, `features`: those after the last known rows.
        """
        if not grows_at_once([g.seq for g in growing]):
            return False
        trees = []
        for g in growing:
            holder = self.followers[g.seq].holder
            sizes = {"size": g.size, "width": g.width, "count": self.options.top_k}
            where = {"num_cached": holder.num_cached, "blocks": holder.blocks, "least": self.policy.least_probability}
            shape = {"exact": False, "limit": self.guesses.vocab_size, **sizes, **where}
            trees.append(growing_tree(g.seq, g.depth, self.guesses.target_ids, g.ending, **shape))
        ends = None if self.branches else self.policy.ends
        grown = self.runner.grow(trees, sum(g.width for g in growing), logits, features, ends)
        if grown is None:
            return False
        for g, found in zip(growing, grown, strict=True):
            g.grown = found
        return True

    def _children(self, g: _Tree, nodes: list[int], rows: NDArray[np.float32]) -> None:
        """Add the likeliest tokens after `nodes`, all of one depth, to the tree; rows: logits [R, Vd] of the pass."""
        own, paths = rows[g.first : g.first + len(nodes)], [g.path(n) for n in nodes]
        tokens, log_probs = self.guesses.after(own, g.seq, paths, self.options.top_k)
        g.add(nodes, tokens.tolist(), log_probs.tolist(), self.policy.least_probability)

    def _take(self, growing: Seq[_Tree], found: Seq[Seq[tuple[int, float]]]) -> None:
        """Take over chains of tokens that were drawn on the device, up to each chain's end."""
        for g, drawn in zip(growing, found, strict=True):
            chain = Chain()
            chain.extend(([one] for one in drawn), self.policy.least_probability, self.guesses.vocab_size, g.ending)
            g.grown = chain.nodes(g.depth)


class _Node(NamedTuple):
    """A node of a tree that may be drafted."""

    token: int
    parent: int  # index of the parent candidate, -1: the last known token
    row: int  # the parent's place in the arguments of `_Tree.add`
    score: float  # the sum of log-probabilities along the path
    ended: bool  # may no token follow?


@dataclass
class _Tree:
    """One sequence's tree or chain while it is drafted: candidate nodes, of which the `size` likeliest are wanted.

    No node scores above its parent, so the n likeliest candidates form a tree. Expanded candidates, `width` a level at
    most, which were run through the head, have a place in its cache; the others have none. Ties go to the candidate
    that was added first. `ending`: tokens after which none may follow. `first`: the row in the pass of the first node
    of the last level. `grown`: tokens, parents and path probabilities of a draft that grew elsewhere: in one native
    call, or on the device.
    """

    seq: Sequence
    size: int
    depth: int
    width: int
    ending: Set[int]
    first: int = 0
    grown: tuple[list[int], list[int], list[float]] | None = None
    nodes: list[_Node] = field(default_factory=list)
    masks: dict[int, int] = field(default_factory=dict)  # expanded candidate -> places of itself and its ancestors
    level: int = 0  # first candidate of the last level

    def add(self, parents: Seq[int], tokens: Seq[Seq[int]], log_probs: Seq[Seq[float]], least: float) -> None:
        """Add a level: tokens [n, w] with log-probabilities after each of `parents` [n] (-1: the last known token).

        Tokens of probability 0 are left out. None may follow a token of `ending` or of a probability below `least`.
        """
        self.level = len(self.nodes)
        for row, parent in enumerate(parents):
            base = self.nodes[parent].score if parent >= 0 else 0.0
            for token, p in zip(tokens[row], log_probs[row], strict=True):
                if p > -math.inf:
                    ended = token in self.ending or math.exp(p) < least
                    self.nodes.append(_Node(token, parent, row, base + p, ended))

    def expand(self) -> list[int]:
        """The candidates of the last level to run next, the likeliest first; they get cache places.

        Candidates outside the `size` likeliest so far are not run, because their children could not be among them.
        """
        able = [i for i in self._likeliest() if i >= self.level and not self.nodes[i].ended]
        able.sort(key=lambda i: -self.nodes[i].score)
        chosen = able[: max(0, min(self.width, MAX_NODES - len(self.masks)))]
        for i in chosen:
            self.masks[i] = self.masks.get(self.nodes[i].parent, 0) | 1 << len(self.masks)
        return chosen

    def path(self, i: int) -> list[int]:
        """The tokens on the path from the first level to candidate i; empty for -1."""
        return [] if i < 0 else [*self.path(self.nodes[i].parent), self.nodes[i].token]

    def _likeliest(self) -> list[int]:
        """The `size` likeliest candidates in the order in which they were added, so parents come before children."""
        return sorted(sorted(range(len(self.nodes)), key=lambda i: -self.nodes[i].score)[: self.size])

    def best(self) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and path probabilities of the draft, parents before children."""
        if self.grown is not None:
            return self.grown
        kept = self._likeliest()
        place, nodes = {-1: -1, **{i: new for new, i in enumerate(kept)}}, [self.nodes[i] for i in kept]
        return [n.token for n in nodes], [place[n.parent] for n in nodes], [math.exp(n.score) for n in nodes]


DRAFTER = EagleDrafter
