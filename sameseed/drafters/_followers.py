"""Followers: a model of the drafter's own that keeps up with the target's sequences, a Shadow for each."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sameseed.drafters._shadow import Shadow
from sameseed.lengths.fixed import FixedLength
from sameseed.models.runner import ModelRunner
from sameseed.request import Sequence
from sameseed.spec.drafter import Below, Drafter, NoDrafter
from sameseed.spec.step import decode_step


class Followers:
    """Shadows by sequence in the cache of `runner`. `below` drafts for this model and learns what the shadows hold."""

    def __init__(self, runner: ModelRunner, prefill_rows: int, vocab_size: int, below: Below | None = None) -> None:
        """`prefill_rows`: the most rows of one pass while it catches up; `vocab_size`: the target's."""
        self.runner = runner
        self.prefill_rows = prefill_rows
        self.vocab_limit = min(vocab_size, runner.model.config.vocab_size)  # from here on: padding, or not known to one
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
        """Bring shadows up to date, with room for num_rows[b] more tokens each; indices of those that can draft now.

        keep[b] <= num_rows[b] tokens that a shadow has behind the target's stay, where it agrees with all of these.
        """
        blocks = self.runner.blocks
        if blocks.num_free * 4 < blocks.num_blocks:  # those that do not run now give theirs back, and catch up later
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
            blocks.enter(mine, min(mine.num_cached, len(seq)))  # what was only guessed is not certain
            if mine.num_pending > blocks.block_size:
                blocks.adopt(mine)
            if blocks.reserve(mine, min(len(seq) + n, self.limit)):
                able.append(b)
        return able

    def catch_up(self, shadows: Seq[Sequence]) -> None:
        """Run long pending prefixes (a prompt, a sequence that went undrafted) in passes of bounded size."""
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
    """Base of drafters that know of a sequence only what their followers hold."""

    followers: Followers

    @property
    def limit(self) -> int:
        return self.followers.limit

    def rewind(self, seq: Sequence, length: int) -> None:
        self.followers.rewind(seq, length)

    def release(self, seq: Sequence) -> None:
        self.followers.release(seq)
