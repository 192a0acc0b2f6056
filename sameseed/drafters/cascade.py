"""cascade drafter: a model writes the draft, itself helped by a drafter below it (hierarchical speculation).

After SpecMQuant (Zhang et al., 2025): the middle model verifies the draft from below, and its text, which is exactly
what it would write alone, is the draft for the target. So levels can be stacked to any depth.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sameseed.drafters._followers import Following
from sameseed.fields import within
from sameseed.request import Sequence, SpecMetrics, TimeSplit
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, Parts, Round
from sameseed.spec.step import decode_step


class CascadeDrafter(Following):
    """Runs `decode_step` on its own model until at least `min_length` tokens are drafted for each sequence."""

    @dataclass(frozen=True)
    class Options(Following.Options):
        min_length: int = within(4, 1, help="the model goes on until it has so many tokens, or the round's limit")

    owns = "model"
    num_below = (1, 1)

    def __init__(self, options: Options, parts: Parts) -> None:
        super().__init__(options, parts, parts.below[0])
        self.below, self.policy_below = parts.below[0].drafter, parts.below[0].policy
        self.metrics = SpecMetrics()  # of this level's model with drafts from below

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """Chains: what the model writes after each sequence, cut to num_draft[b] tokens, never padded."""
        limit = self.followers.limit
        active = self.followers.follow(seqs, num_draft)
        drafting = list(active)
        levels: list[list[int]] = [[] for _ in seqs]
        while active:
            shadows = [self.followers[seqs[b]] for b in active]
            failed = self._advance(shadows, [levels[b] for b in active])
            active = [
                b
                for b, shadow, stopped in zip(active, shadows, failed, strict=True)
                if not stopped and len(shadow) - len(seqs[b]) < min(self.options.min_length, num_draft[b])
                if len(shadow) < limit and self.runner.blocks.reserve(shadow, len(shadow))
            ]
        chains: list[list[int]] = [[] for _ in seqs]
        for b in drafting:
            written = self.followers[seqs[b]].token_ids[len(seqs[b]) : len(seqs[b]) + num_draft[b]]
            known = next((i for i, t in enumerate(written) if t >= self.followers.vocab_limit), len(written))
            chains[b] = written[:known]
            del levels[b][known:]
        return Draft.chains(chains, levels=levels)

    def _advance(self, shadows: list[Sequence], levels: list[list[int]]) -> list[bool]:
        """One pass of the model over drafts from below: each shadow grows by one token or more, unless it failed.

        levels[b] grows by the level that first drafted each of the tokens. Returns which shadows failed.
        """
        pending = [s.num_pending for s in shadows]
        asked = self.policy_below.lengths(shadows, sum(pending))
        room, blocks = [], self.runner.blocks
        for shadow, num in zip(shadows, asked, strict=True):  # draft nodes for which text and blocks have room
            useful = num if self.below.branches else min(num, shadow.draft_depth)
            free = blocks.reservable(shadow) - len(shadow)
            room.append(max(0, min(useful, free)) if shadow.draft_depth else 0)
            blocks.reserve(shadow, len(shadow) + room[-1])
        times = TimeSplit()
        draft, result = decode_step(self.runner, self.below, shadows, pending, room, times, self.policy_below)
        counts = [draft.count(b) for b in range(len(shadows))]
        accepted = [len(nodes) for nodes in result.nodes]
        num_rows = sum(pending) + sum(counts)
        self.policy_below.update(Round(shadows, room, counts, accepted, num_rows, times, result.nodes))
        own = len(self.below.level_names)
        for b, (guessed, right) in enumerate(zip(counts, accepted, strict=True)):
            self.metrics.update(guessed, right)
            by = draft.node_levels(b)
            levels[b] += [by[node] for node in result.nodes[b]]
            levels[b] += [own] * (len(result.tokens[b]) - right)
        return [bool(f) for f in result.failed]

    @property
    def level_names(self) -> tuple[str, ...]:
        return (*self.below.level_names, self.name)

    def counted(self) -> list[tuple[Drafter, SpecMetrics]]:
        return [*self.below.counted(), (self.below, self.metrics)]


DRAFTER = CascadeDrafter
