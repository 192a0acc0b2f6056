"""Which sequences are left alone because drafting for them does not pay, and when it is tried again."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sameseed.request import Sequence

FIRST_PROBE, LAST_PROBE = 16, 512  # rounds without a draft before it is tried again, doubled each time in vain
PROBE_TOKENS, PROBE_ROUNDS = 2, 2  # in the first of a probe's rounds the drafter has to catch up
LOSS = 0.02  # of all time may go into probes


class Probing:
    """One sequence at a time is tried again, the one that has waited longest; how often depends on what that costs.

    While sequences wait, nothing is worked out for them: plain decoding should cost what it costs.
    """

    def __init__(self) -> None:
        self._idle: dict[int, int] = {}  # rows of the pass when it was decided, by sequence, in order of waiting
        self._period = FIRST_PROBE
        self._waited = 0  # rounds since the last probe, or since one began to wait
        self._trying: int | None = None  # the sequence that is tried, and for how many rounds more
        self._rounds = 0

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._idle

    def next(self, seqs: Seq[Sequence], rows: int, num_draft_tokens: int) -> list[int | None]:
        """The lengths for sequences that wait, 0 or a probe's; None: it is to be decided.

        That is so after a probe, and when passes have become half as large: then drafts may pay.
        """
        found: list[int | None] = []
        for seq in seqs:
            at = self._idle.get(seq.seq_id)
            found.append(None if at is None or 2 * rows <= at else 0)
        if 0 not in found:
            return found
        self._waited += 1
        if self._trying is None and self._waited >= self._period:
            waiting = {seq.seq_id for seq, k in zip(seqs, found, strict=True) if k == 0}
            self._trying = next(seq_id for seq_id in self._idle if seq_id in waiting)
            self._rounds, self._waited = PROBE_ROUNDS, 0
        if self._trying is not None:
            for b, seq in enumerate(seqs):
                if seq.seq_id == self._trying and found[b] == 0:
                    found[b] = min(PROBE_TOKENS, num_draft_tokens) if self._rounds > 0 else None
                    self._rounds -= 1
        return found

    def note(self, seq: Sequence, rows: int, length: int, cost: float) -> None:
        """What was decided for a sequence in a pass of `rows` rows. `cost`: of a probe, in rounds without a draft."""
        tried = seq.seq_id == self._trying
        if tried:
            self._trying = None
        if length:
            if self._idle.pop(seq.seq_id, None) is not None:
                self._period = FIRST_PROBE
            return
        self._idle.pop(seq.seq_id, None)
        self._idle[seq.seq_id] = rows  # the last in the queue
        least = min(max(FIRST_PROBE, round(cost / LOSS)), LAST_PROBE)
        self._period = max(least, min(2 * self._period, LAST_PROBE) if tried else self._period)

    def release(self, seq: Sequence) -> None:
        """The sequence is gone."""
        self._idle.pop(seq.seq_id, None)
        if self._trying == seq.seq_id:
            self._trying = None
