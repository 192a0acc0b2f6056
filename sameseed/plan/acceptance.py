"""Acceptance: how many draft tokens would be accepted at every position of texts that the target wrote.

No time is measured. Coupled sampling makes acceptance exact: the target's choice at a position is a pure function of
prefix, parameters, seed and position. So a draft path is accepted as far as it equals the text. The fields of
ReplayRates are named as in ModelOpt's `speculation_profile.json`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sameseed.cost.round import Drafted
from sameseed.errors import ConfigError
from sameseed.spec.draft import Draft
from sameseed.store import Arrays

Ints = NDArray[np.int64]
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # draft sizes that a replay evaluates


@dataclass(frozen=True)
class ReplayRates:
    """Rates that a run with a fixed draft size would count, over all its rounds after the first token.

    `marginal_accept_rates[i]`: share of rounds in which draft token i was accepted; `conditional_accept_rates[i]`: the
    same of the rounds in which all tokens before it were accepted. `mean_accept_length`: tokens per round;
    `mean_acceptance_length`: the same over rounds with a draft (None: there were none). `acceptance_rate`: accepted
    over drafted tokens. `undrafted`: share of rounds without a draft.
    """

    num_draft_tokens: int
    num_rounds: int
    conditional_accept_rates: tuple[float, ...]
    marginal_accept_rates: tuple[float, ...]
    mean_accept_length: float
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    undrafted: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Replay:
    """What drafts of S sizes would have brought at P positions of n texts.

    Position i of a text is a round that begins with i + 1 generated tokens; text t has positions offsets[t] ..
    offsets[t + 1]. `accepted`, `nodes` int16 [P, S]: accepted tokens, up to the text's end, and nodes that were
    verified. `steps` int16 [P, S, D]: depth of the nodes that each of the D levels drafted.
    """

    sizes: tuple[int, ...]
    offsets: Ints
    accepted: NDArray[np.int16]
    nodes: NDArray[np.int16]
    steps: NDArray[np.int16]

    def column(self, size: int) -> int:
        """The index of a draft size. Raises ConfigError for a size that was not replayed."""
        if size not in self.sizes:
            known = ", ".join(map(str, self.sizes))
            raise ConfigError(f"drafts of {size} tokens were not replayed; choose one of {known}")
        return self.sizes.index(size)

    def rounds(self, size: int) -> Ints:
        """Positions at which a run with this draft size begins its rounds: all first rounds before all second ones."""
        at, ends = self.offsets[:-1], self.offsets[1:]
        accepted = self.accepted[:, self.column(size)] if size else np.zeros(len(self.accepted), np.int16)
        found = []
        while len(at):
            running = at < ends
            at, ends = at[running], ends[running]
            found.append(at)
            at = at + accepted[at] + 1
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def rates(self, size: int) -> ReplayRates:
        """Acceptance rates of a run with this draft size."""
        at, column = self.rounds(size), self.column(size)
        accepted, nodes = self.accepted[at, column], self.nodes[at, column]
        survivors = [len(at), *(int((accepted > i).sum()) for i in range(int(accepted.max(initial=0))))]
        total, drafted, drafts = int(accepted.sum()), int(nodes.sum()), int((nodes > 0).sum())
        return ReplayRates(
            size,
            len(at),
            tuple(now / before for before, now in pairwise(survivors)),
            tuple(now / len(at) for now in survivors[1:]),
            1.0 + total / max(1, len(at)),
            1.0 + total / drafts if drafts else None,
            total / drafted if drafted else None,
            1.0 - drafts / max(1, len(at)),
        )

    def drafted(self, k: int) -> Drafted:
        """The mean round of a run with drafts of `k` tokens, for `expected`."""
        at, column = self.rounds(k), self.column(k)
        if not len(at):
            return Drafted(0.0, 0.0, ())
        levels = []
        for steps in self.steps[at, column].T:
            used = steps[steps > 0]
            levels.append((len(used) / len(at), float(used.mean()) if len(used) else 0.0))
        accepted, nodes = self.accepted[at, column], self.nodes[at, column]
        return Drafted(float(accepted.mean()), float(nodes.mean()), tuple(levels))

    def only(self, sizes: Seq[int]) -> Replay:
        """The replay with these draft sizes only. Raises ConfigError for a size that was not replayed."""
        at = [self.column(size) for size in sizes]
        cut = self.accepted[:, at], self.nodes[:, at], self.steps[:, at]
        return Replay(tuple(sizes), self.offsets, *cut)

    def as_arrays(self) -> Arrays:
        """The arrays that the store keeps."""
        return {**vars(self), "sizes": np.array(self.sizes, np.int32)}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Replay:
        """The inverse of `as_arrays`."""
        named: dict[str, Any] = {**arrays, "sizes": tuple(arrays["sizes"].tolist())}
        return cls(**named)


def sizes_up_to(num_draft_tokens: int) -> tuple[int, ...]:
    """The draft sizes of a replay, up to `num_draft_tokens`. Raises ConfigError for a number out of range."""
    if not 1 <= num_draft_tokens <= SIZES[-1]:
        raise ConfigError(f"the largest draft of a replay must lie in 1..{SIZES[-1]}, got {num_draft_tokens}")
    return (*(s for s in SIZES if s < num_draft_tokens), num_draft_tokens)


@dataclass(frozen=True)
class Event:
    """One draft compared with the text: for each draft size accepted tokens, nodes, and steps of each level."""

    accepted: list[int]
    nodes: list[int]
    steps: list[list[int]]

    @classmethod
    def joined(cls, parts: Seq[Event]) -> Event:
        """One event of many draft sizes, from events of some sizes each."""
        return cls(
            [a for e in parts for a in e.accepted],
            [n for e in parts for n in e.nodes],
            [s for e in parts for s in e.steps],
        )


def judge(
    draft: tuple[Seq[int], Seq[int]],
    confidence: Seq[float] | None,
    levels: Seq[int],
    num_levels: int,
    text: Seq[int],
    sizes: Seq[int],
) -> Event:
    """Compare a draft (tokens, parents), cut to its likeliest nodes for each of `sizes`, with the `text` that follows.

    Without `confidence`, or where a value is NaN, nodes are taken in their order.
    """
    tokens, parents = draft
    path = _right_path(tokens, parents, text)
    order = ranked(parents, confidence)
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    found = Event([], [], [])
    deepest, right, done = [0] * num_levels, 0, 0
    for size in sizes:
        for node in order[done:size]:
            deepest[levels[node]] = max(deepest[levels[node]], depths[node])
            right += node in path
        done = min(size, len(order))
        found.accepted.append(right)
        found.nodes.append(done)
        found.steps.append(list(deepest))
    return found


def ranked(parents: Seq[int], confidence: Seq[float] | None) -> list[int]:
    """Nodes, the likeliest first and none before its parent; in their order where confidence is unknown."""
    order = list(range(len(parents)))
    if confidence is not None and not any(c != c for c in confidence):
        sure: list[float] = []
        for own, parent in zip(confidence, parents, strict=True):
            sure.append(min(own, sure[parent]) if parent >= 0 else own)
        order.sort(key=sure.__getitem__, reverse=True)  # stable: parents come before children
    return order


def confidence_of(draft: Draft, b: int) -> list[float] | None:
    """How likely each node of sequence b is right; None where the drafter does not say."""
    if draft.confidence is None:
        return None
    found: list[float] = draft.confidence[draft.offsets[b] : draft.offsets[b + 1]].tolist()
    return found


def _right_path(tokens: Seq[int], parents: Seq[int], text: Seq[int]) -> set[int]:
    """Nodes that `verify` would accept; of children with equal tokens the first counts."""
    children = {(p, t): i for i, (p, t) in reversed(list(enumerate(zip(parents, tokens, strict=True))))}
    path: set[int] = set()
    node: int | None = -1
    for token in text:
        node = children.get((node, token)) if node is not None else None
        if node is None:
            break
        path.add(node)
    return path
