"""first drafter: several drafters in turn, for each sequence the first that has a draft (a lookup, then a model).

A lookup costs almost nothing compared with a model's pass, so it is tried first (as SAM-Decoding: Hu et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sameseed.fields import within
from sameseed.request import Sequence, SpecMetrics
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, Parts, Span

MAX_BELOW = 64
RECENT = 0.998  # decay per round of the share that lookups draft: some 500 rounds, a few answers, count


class FirstDrafter(Drafter):
    """Asks each drafter about the sequences for which those before it gave no draft, or one too weak to use."""

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        min_tokens: int = within(2, 1, help="a draft is used if it has so many nodes, or all that were asked for")
        min_expected: float = within(1.0, 0, help="and if its path probabilities, where known, have at least this sum")

    num_below = (2, MAX_BELOW)

    def __init__(self, options: Options, parts: Parts) -> None:
        self.options, self.policy = options, parts.policy
        self.below = tuple(b.drafter for b in parts.below)
        self._policies = tuple(b.policy for b in parts.below)
        self.metrics = tuple(SpecMetrics() for _ in parts.below)  # of each drafter's drafts
        self._starts = [0, *accumulate(len(d.level_names) for d in self.below)]  # first level number of each drafter
        self._tokens, self._missed = 1.0, 1.0  # decided tokens, and those of them in rounds without a lookup's draft
        self._taken: dict[int, tuple[int, int]] = {}  # by sequence: index of the drafter, known tokens before the draft
        self.branches = any(d.branches for d in self.below)
        self.must_read = all(d.must_read for d in self.below)
        self.captures = tuple(sorted({layer for d in self.below for layer in d.captures}))

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        trees: list[tuple[list[int], list[int]]] = [([], []) for _ in seqs]
        sure: list[list[float]] = [[] for _ in seqs]
        levels: list[list[int]] = [[] for _ in seqs]
        open_ = [b for b, k in enumerate(num_draft) if k > 0]
        self._taken.clear()
        for which, (d, policy) in enumerate(zip(self.below, self._policies, strict=True)):
            if not open_:
                break
            if d.must_read and which:  # a model that lookups spared a text may not be worth reading it for the rest
                unread = {b: len(seqs[b]) - d.num_read(seqs[b]) for b in open_}
                open_ = [b for b in open_ if self.policy.recovers(seqs[b], unread[b], self._missed / self._tokens)]
            asked = [0] * len(seqs)
            for b, k in zip(open_, policy.lengths([seqs[b] for b in open_]), strict=True):
                asked[b] = min(num_draft[b], k if d.branches else min(k, seqs[b].draft_depth))
            draft = d.propose(seqs, asked).read()
            taken = []
            for b in open_:
                begin, end = int(draft.offsets[b]), int(draft.offsets[b + 1])
                likely = np.full(end - begin, np.nan) if draft.confidence is None else draft.confidence[begin:end]
                enough = end - begin >= min(self.options.min_tokens, asked[b]) and begin < end
                expected = float(np.where(np.isnan(likely), 1.0, likely).sum())
                enough = enough and expected >= min(self.options.min_expected, asked[b])
                if enough or (begin < end and d is self.below[-1]):  # the last drafter's is used even if weak
                    trees[b], sure[b] = draft.nodes(b), likely.tolist()
                    levels[b] = [self._starts[which] + level for level in draft.node_levels(b)]
                    taken.append(b)
                    self._taken[seqs[b].seq_id] = which, len(seqs[b])
            open_ = [b for b in open_ if b not in taken]
        return Draft.trees(trees, sure, levels)

    def observe(self, seqs: Seq[Sequence], spans: Seq[Span], hidden: Tensor | None) -> None:
        self._tokens, self._missed = RECENT * self._tokens, RECENT * self._missed
        for seq, span in zip(seqs, spans, strict=True):
            which, num_known = self._taken.pop(seq.seq_id, (-1, 0))
            if which >= 0:
                self.metrics[which].update(span.num_draft, span.end - num_known)
            if seq.num_output > 1:
                self._tokens += span.end - span.start
                self._missed += (span.end - span.start) * (which < 0 or self.below[which].must_read)
        for d in self.below:
            own = hidden if d.captures else None
            if own is not None and d.captures != self.captures:
                by_layer = own.chunk(len(self.captures), dim=1)
                own = torch.cat([by_layer[self.captures.index(layer)] for layer in d.captures], dim=1)
            d.observe(seqs, spans, own)

    @property
    def limit(self) -> int | None:
        """The largest limit of the drafters below: this drafter drafts as long as one of them does."""
        limits = [d.limit for d in self.below]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    def rewind(self, seq: Sequence, length: int) -> None:
        for d in self.below:
            d.rewind(seq, length)

    def release(self, seq: Sequence) -> None:
        self._taken.pop(seq.seq_id, None)
        for d in self.below:
            d.release(seq)

    def num_read(self, seq: Sequence) -> int:
        return sum(d.num_read(seq) for d in self.below)

    @property
    def level_names(self) -> tuple[str, ...]:
        return tuple(name for d in self.below for name in d.level_names)

    def counted(self) -> list[tuple[Drafter, SpecMetrics]]:
        own = zip(self.below, self.metrics, strict=True)
        return [level for d, metrics in own for level in (*d.counted(), (d, metrics))]


DRAFTER = FirstDrafter
