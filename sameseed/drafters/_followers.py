"""Followers: keeps a drafter's own model up to date with the target's sequences, with one Shadow per sequence."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Protocol

from sameseed.drafters._shadow import Shadow
from sameseed.lengths._cost import LEAST_ROWS, PromptCost
from sameseed.lengths.fixed import FixedLength
from sameseed.models.runner import ModelRunner
from sameseed.request import Sequence
from sameseed.spec.drafter import Below, Drafter, NoDrafter
from sameseed.spec.step import decode_step


class State(Protocol):
    """What a drafter's model has of one sequence: rows in its cache, and known tokens without one."""

    @property
    def num_cached(self) -> int: ...
    @property
    def num_pending(self) -> int: ...


class CatchUp:
    """Reads long pending stretches (a prompt, or tokens decided without drafts) in passes of at most `max_rows` rows.

    While another sequence streams its output, a round reads for at most `max_seconds`, or `LEAST_ROWS` rows. Sequences
    that are not read to their end then are `waiting`: they get no draft in this round.
    """

    def __init__(self, max_rows: int, max_seconds: float) -> None:
        self.max_rows = max_rows
        self.waiting: set[int] = set()
        self._cost = PromptCost(max_seconds)

    def __call__(
        self, seqs: Seq[Sequence], states: Mapping[int, State], read: Callable[[list[int], list[int]], None]
    ) -> list[int]:
        """Those of `states` (by index in `seqs`) that can draft now. `read(b, n)` reads n[i] rows of sequence b[i]."""
        self.waiting.difference_update(seq.seq_id for seq in seqs)
        able = sorted(states, key=lambda b: states[b].num_pending)
        while (total := sum(states[b].num_pending for b in able)) > 2 * len(able):
            limited = any(seq.streamed and seq.num_output > 0 for b, seq in enumerate(seqs) if b != able[-1])
            left = self._fitting(states[able[-1]].num_cached) if limited else self.max_rows
            if total <= left:
                break
            sizes: dict[int, int] = {}
            for b in able:
                sizes[b] = min(states[b].num_pending - 1, left)
                left -= sizes[b]
            which = [b for b in able if sizes[b]]
            chunks = [(sizes[b], states[b].num_cached) for b in which]
            start = time.perf_counter()
            read(which, [n for n, _ in chunks])
            self._cost.learn(chunks, time.perf_counter() - start)
            if limited:
                self.waiting |= {seqs[b].seq_id for b in able if states[b].num_pending > 2}
                return [b for b in states if states[b].num_pending <= 2]
        return list(states)

    def _fitting(self, num_cached: int) -> int:
        """Rows that take at most `max_seconds` after `num_cached` tokens."""
        sizes, cost = range(1, self.max_rows + 1), self._cost
        return max(LEAST_ROWS, bisect_right(sizes, cost.limit, key=lambda n: cost.seconds(n, num_cached)))


class Followers:
    """The Shadows of all sequences, in the cache of `runner`. `below`: a drafter that drafts for the shadows' model."""

    def __init__(
        self,
        runner: ModelRunner,
        prefill_rows: int,
        vocab_size: int,
        below: Below | None = None,
        max_seconds: float = math.inf,
    ) -> None:
        """`prefill_rows`, `max_seconds`: of one catch-up pass (`CatchUp`); `vocab_size`: the target's."""
        self.runner = runner
        self.catch_up = CatchUp(prefill_rows, max_seconds)
        self.vocab_limit = min(vocab_size, runner.model.config.vocab_size)  # ids from here on: padding, or in one only
        self.below = below.drafter if below else NoDrafter()
        self._policy = below.policy if below else FixedLength(0)
        self._shadows: dict[int, Shadow] = {}

    @property
    def limit(self) -> int:
        return self.runner.model.max_model_len

    def __len__(self) -> int:
        return len(self._shadows)

    def __getitem__(self, seq: Sequence) -> Sequence:
        """The shadow's own sequence: the target's tokens, then drafted ones."""
        return self._shadows[seq.seq_id].seq

    def follow(self, seqs: Seq[Sequence], num_rows: Seq[int], keep: Seq[int] | None = None) -> list[int]:
        """Update the shadows to the target's tokens, with blocks for num_rows[b] more; indices of those that can draft.

        Long pending stretches are read; few tokens stay pending, one at least.

        keep[b] <= num_rows[b]: drafted tokens that a shadow keeps after the target's, if it agrees with all of those.
        """
        blocks = self.runner.blocks
        if blocks.num_free * 4 < blocks.num_blocks:  # sequences that do not run free theirs, and catch up later
            running = {seq.seq_id for seq in seqs}
            for seq_id, idle in self._shadows.items():
                if seq_id not in running:
                    blocks.release(idle.seq)
        able: dict[int, Sequence] = {}
        for b, (seq, n) in enumerate(zip(seqs, num_rows, strict=True)):
            if n <= 0:
                continue
            shadow = self._shadows.get(seq.seq_id)
            new = seq.token_ids[shadow.num_agreed if shadow is not None else 0 :]
            if len(seq) >= self.limit or max(new, default=0) >= self.vocab_limit:
                continue
            if shadow is None:
                shadow = self._shadows[seq.seq_id] = Shadow(seq, self.runner)
            shadow.follow(seq, self.below.rewind, keep[b] if keep else 0)
            mine = shadow.seq
            blocks.enter(mine, min(mine.num_cached, len(seq)))  # drafted tokens are not certain
            if mine.num_pending > blocks.block_size:
                blocks.adopt(mine)
            if blocks.reserve(mine, min(len(seq) + n, self.limit)):
                able[b] = mine

        def read(which: list[int], sizes: list[int]) -> None:
            decode_step(self.runner, self.below, [able[b] for b in which], sizes, [0] * len(sizes))

        return self.catch_up(seqs, able, read) if able else []

    def rewind(self, seq: Sequence, length: int) -> None:
        shadow = self._shadows.get(seq.seq_id)
        if shadow is not None:
            shadow.num_agreed = min(shadow.num_agreed, length)

    def release(self, seq: Sequence) -> None:
        self.catch_up.waiting.discard(seq.seq_id)
        shadow = self._shadows.pop(seq.seq_id, None)
        if shadow is not None:
            self.below.release(shadow.seq)
            self._policy.release(shadow.seq)
            self.runner.blocks.release(shadow.seq)


class Following(Drafter):
    """Base of drafters whose only state per sequence is in `followers`."""

    followers: Followers

    @property
    def limit(self) -> int:
        return self.followers.limit

    def waits(self, seq: Sequence) -> bool:
        return seq.seq_id in self.followers.catch_up.waiting

    def rewind(self, seq: Sequence, length: int) -> None:
        self.followers.rewind(seq, length)

    def release(self, seq: Sequence) -> None:
        self.followers.release(seq)
