"""eagle drafter: a head reads the target's own hidden states and drafts a tree (EAGLE-2 and 3: Li et al., 2024, 2025).

The tree is dynamic. Level by level the likeliest paths are expanded, all nodes of a level in one pass of the head, and
the likeliest nodes overall are kept. With sampling, paths are ranked by the head's log-probabilities plus the target's
own noise, which is known before the target chooses (coupled sampling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence as Seq, Set
from dataclasses import dataclass
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
from sameseed.drafters._followers import PREFILL
from sameseed.drafters._vocabulary import VOCABULARY
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
    class Options(Drafter.Options):
        depth: int = within(5, 1, MAX_NODES, help="the longest path of a tree; --k sets how many nodes are kept")
        top_k: int = within(8, 1, MAX_NODES, help="nodes expanded per level, and children of each (1: a chain)")
        vocabulary: str = setting("", VOCABULARY)
        beyond: str = setting(
            "slide", "past the head's own context: slide moves its attention window along, stop ends drafting"
        )
        window: int = within(0, 0, help="the most tokens that the head attends to (0: its own context)")
        prefill_rows: int = within(512, 1, help=PREFILL)

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
        growing: dict[int, _GrowingTree] = {}
        with self.followers.drafting(seqs, depths, lambda b, depth: min(widths[b] * (depth - 1), MAX_NODES)) as ready:
            for b, depth in ready.items():
                ending = seqs[b].params.ending(self.guesses.eos_token_ids)
                growing[b] = _GrowingTree(seqs[b], Tree(min(num_draft[b], MAX_NODES)), depth, widths[b], ending)
            own = list(growing.values())
            drawn = self._grow(own) if own else None
        if drawn is None:
            return _draft_of(growing, len(seqs))

        def read(found: Seq[Seq[tuple[int, float]]]) -> Draft:
            self._take(own, found)
            return _draft_of(growing, len(seqs))

        return LateDraft.of(drawn, list(growing), len(seqs), read)

    def _grow(self, growing: Seq[_GrowingTree]) -> Drawn | None:
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

    def _grow_by_level(self, growing: Seq[_GrowingTree], logits: Tensor, features: Tensor) -> None:
        """Grow trees: the first level from the rows of known positions, then one pass of the head per level."""
        rows = self.guesses.rows(logits)
        for i, g in enumerate(growing):
            g.first = i
            self._children(g, [-1], rows, 0)
        for depth in range(1, max(g.depth for g in growing)):
            levels: list[TreeLevel] = []
            parents: list[int] = []  # rows of `features`
            running: list[tuple[_GrowingTree, list[int]]] = []
            num_rows = 0
            for g in growing:
                tree, place = g.tree, len(g.tree.masks)
                chosen = tree.expand(g.width if depth < g.depth else 0)
                if not chosen:
                    continue
                tokens, masks = [tree.nodes[n].token for n in chosen], [tree.masks[n] for n in chosen]
                levels.append(TreeLevel(self.followers[g.seq].holder, tokens, masks, place))
                parents += [g.first + tree.nodes[n].row for n in chosen]
                running.append((g, chosen))
                g.first, num_rows = num_rows, num_rows + len(chosen)
            if not running:
                return
            if not self.branches and self.policy.ends([[math.exp(n.score) for n in g.tree.nodes] for g, _ in running]):
                return
            index = devices.put(torch.tensor(parents, device="cpu"), features.device)
            logits, features = self.runner.expand(levels, features.index_select(0, index))
            rows = self.guesses.rows(logits)
            for g, chosen in running:
                self._children(g, chosen, rows, depth)

    def _grow_at_once(self, growing: Seq[_GrowingTree], logits: Tensor, features: Tensor) -> bool:
        """Grow whole trees or chains in one native call; False if that is impossible, with nothing done.

        `logits`, `features`: those after the last known rows.
        """
        if not grows_at_once([g.seq for g in growing]):
            return False
        trees = []
        for g in growing:
            holder = self.followers[g.seq].holder
            sizes = {"size": g.tree.size, "width": g.width, "count": self.options.top_k}
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

    def _children(self, g: _GrowingTree, nodes: list[int], rows: NDArray[np.float32], depth: int) -> None:
        """Add the likeliest tokens after `nodes`, all of one depth, to the tree; rows: logits [R, Vd] of the pass."""
        tree, rows = g.tree, rows[g.first : g.first + len(nodes)]
        tokens, log_probs = self.guesses.after(
            rows, g.seq, depth, self.options.top_k, lambda: [tree.path(n) for n in nodes]
        )
        least = self.policy.least_probability
        tree.grow(nodes, tokens.tolist(), log_probs.tolist(), lambda token, p: token in g.ending or math.exp(p) < least)

    def _take(self, growing: Seq[_GrowingTree], found: Seq[Seq[tuple[int, float]]]) -> None:
        """Take over chains of tokens that were drawn on the device, up to each chain's end."""
        for g, drawn in zip(growing, found, strict=True):
            chain = Chain()
            chain.extend(([one] for one in drawn), self.policy.least_probability, self.guesses.vocab_size, g.ending)
            g.grown = chain.nodes(g.depth)


class TreeNode(NamedTuple):
    """A node of a tree that may be drafted."""

    token: int
    parent: int  # index of the parent candidate, -1: the last known token
    row: int  # the parent's place in the arguments of `Tree.grow`
    score: float  # the sum of log-probabilities along the path
    ended: bool  # may no token follow?


class Tree:
    """Candidate nodes for the draft of one sequence, of which the `size` likeliest are wanted.

    No node scores above its parent, so the n likeliest candidates form a tree. Expanded candidates, which were run
    through the drafter's model, have a place in the model's cache; the others have none. Ties go to the candidate that
    was added first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.nodes: list[TreeNode] = []
        self.masks: dict[int, int] = {}  # expanded candidate -> cache places of itself and its ancestors, as a bit mask
        self._level = 0  # first candidate of the last level

    def grow(
        self,
        parents: Seq[int],
        tokens: Seq[Seq[int]],
        log_probs: Seq[Seq[float]],
        ended: Callable[[int, float], bool] = lambda token, log_prob: False,
    ) -> None:
        """Add a level: tokens [n, w] with log-probabilities after each of `parents` [n] (-1: the last known token).

        Tokens of probability 0 are left out. `ended`: may no token follow this one?
        """
        self._level = len(self.nodes)
        for row, parent in enumerate(parents):
            base = self.nodes[parent].score if parent >= 0 else 0.0
            for token, p in zip(tokens[row], log_probs[row], strict=True):
                if p > -math.inf:
                    self.nodes.append(TreeNode(token, parent, row, base + p, ended(token, p)))

    def expand(self, width: int) -> list[int]:
        """At most `width` candidates of the last level to run next, the likeliest first; they get cache places.

        Candidates outside the `size` likeliest so far are not run, because their children could not be among them.
        """
        able = [i for i in self._likeliest() if i >= self._level and not self.nodes[i].ended]
        able.sort(key=lambda i: -self.nodes[i].score)
        chosen = able[: max(0, min(width, MAX_NODES - len(self.masks)))]
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
        """Tokens, parents and path probabilities of the `size` likeliest candidates, parents before children."""
        kept = self._likeliest()
        place, nodes = {-1: -1, **{i: new for new, i in enumerate(kept)}}, [self.nodes[i] for i in kept]
        return [n.token for n in nodes], [place[n.parent] for n in nodes], [math.exp(n.score) for n in nodes]


@dataclass
class _GrowingTree:
    """One sequence's tree or chain while it is drafted.

    `ending`: tokens after which none may follow. `first`: the row in the pass of the first node of the tree's last
    level. `grown`: tokens, parents and path probabilities of a draft that grew elsewhere: in one native call, or on the
    device.
    """

    seq: Sequence
    tree: Tree
    depth: int
    width: int
    ending: Set[int]
    first: int = 0
    grown: tuple[list[int], list[int], list[float]] | None = None


def _draft_of(growing: Mapping[int, _GrowingTree], num_seqs: int) -> Draft:
    """The Draft of what has grown, by index of the sequence, with confidence."""
    trees: list[tuple[list[int], list[int]]] = [([], []) for _ in range(num_seqs)]
    sure: list[list[float]] = [[] for _ in range(num_seqs)]
    for b, g in growing.items():
        tokens, parents, sure[b] = g.grown or g.tree.best()
        trees[b] = tokens, parents
    return Draft.trees(trees, sure)


DRAFTER = EagleDrafter
