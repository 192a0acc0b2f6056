"""Followers: keeps a drafter's own model up to date with the target's sequences, with one Shadow per sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sameseed.drafters._shadow import Shadow
from sameseed.lengths.fixed import FixedLength
from sameseed.models.runner import ModelRunner
from sameseed.request import Sequence
from sameseed.spec.drafter import Below, Drafter, NoDrafter
from sameseed.spec.step import decode_step


class Followers:
    """The Shadows of all sequences, in the cache of `runner`. `below`: a drafter that drafts for the shadows' model."""

    def __init__(self, runner: ModelRunner, prefill_rows: int, vocab_size: int, below: Below | None = None) -> None:
        """`prefill_rows`: the most rows of one catch-up pass; `vocab_size`: the target's."""
        self.runner = runner
        self.prefill_rows = prefill_rows
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

        keep[b] <= num_rows[b]: drafted tokens that a shadow keeps after the target's, if it agrees with all of those.
        """
        blocks = self.runner.blocks
        if blocks.num_free * 4 < blocks.num_blocks:  # sequences that do not run free theirs, and catch up later
            running = {seq.seq_id for seq in seqs}
            for seq_id, idle in self._shadows.items():
                if seq_id not in running:
                    blocks.release(idle.seq)
        able: list[int] = []
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
                able.append(b)
        return able

    def catch_up(self, shadows: Seq[Sequence]) -> None:
        """Run long pending stretches (a prompt, or tokens decoded without drafts) in passes of bounded size."""
        while sum(s.num_pending for s in shadows) > max(self.prefill_rows, 2 * len(shadows)):
            left = self.prefill_rows
            chunks: list[tuple[Sequence, int]] = []
            for seq in shadows:
                size = min(seq.num_pending - 1, left)
                if size > 0:
                    chunks.append((seq, size))
                    left -= size
            decode_step(self.runner, self.below, [c[0] for c in chunks], [c[1] for c in chunks], [0] * len(chunks))

    def rewind(self, seq: Sequence, length: int) -> None:
        shadow = self._shadows.get(seq.seq_id)
        if shadow is not None:
            shadow.num_agreed = min(shadow.num_agreed, length)

    def release(self, seq: Sequence) -> None:
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

    def rewind(self, seq: Sequence, length: int) -> None:
        self.followers.rewind(seq, length)

    def release(self, seq: Sequence) -> None:
        self.followers.release(seq)
