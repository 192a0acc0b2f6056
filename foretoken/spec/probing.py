"""Which sequences are left alone because drafting for them does not pay, and when it is tried again."""

from __future__ import annotations

from foretoken.request import Sequence

FIRST_PROBE, LAST_PROBE = 16, 512  # rounds without a draft before it is tried again, doubled each time in vain
PROBE_TOKENS, PROBE_ROUNDS = 3, 2  # in the first of a probe's rounds the drafter has to catch up


class _Idle:
    """Rounds until the next trial, and of how many rows the passes were when it was decided."""

    def __init__(self, rows: int) -> None:
        self.period = self.left = FIRST_PROBE
        self.rows = rows
        self.tries = 0  # rounds of the probe that runs


class Probing:
    """By sequence. While one waits, nothing is worked out for it: plain decoding should cost what it costs."""

    def __init__(self) -> None:
        self._idle: dict[int, _Idle] = {}

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._idle

    def next(self, seq: Sequence, rows: int, most: int) -> int | None:
        """The length for a sequence that waits, 0 or a probe's; None: it is to be decided.

        That is so after a probe, and when passes have become half as large: then drafts may pay.
        """
        idle = self._idle.get(seq.seq_id)
        if idle is None or idle.tries == PROBE_ROUNDS or 2 * rows <= idle.rows:
            return None
        idle.left -= 1
        if idle.left > 0:
            return 0
        idle.tries += 1
        if idle.tries == 1:
            idle.period = min(2 * idle.period, LAST_PROBE)
        return min(PROBE_TOKENS, most)

    def note(self, seq: Sequence, rows: int, length: int) -> None:
        """What was decided for a sequence, in a pass of so many rows."""
        if length:
            self._idle.pop(seq.seq_id, None)
            return
        idle = self._idle.setdefault(seq.seq_id, _Idle(rows))
        idle.left, idle.rows, idle.tries = idle.period, rows, 0

    def release(self, seq: Sequence) -> None:
        """The sequence is gone."""
        self._idle.pop(seq.seq_id, None)
