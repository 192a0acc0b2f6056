"""What finding out may cost: a share of all time, so that who never gains never loses either.

A bandit that keeps a baseline (Wu et al., "Conservative Bandits", 2016). The baseline is plain decoding. Drafts that
are expected to lose are tried only where what they lose is at most `SHARE` of what has passed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sameseed.request import Sequence

SHARE = 0.0075  # of all rounds
FIRST, MOST = 2.0, 8.0  # rounds without a draft that may be lost at the start, and at most at once
FIRST_WAIT, LAST_WAIT = 16, 512  # rounds before a sequence is tried again, doubled each time in vain
TRIAL_TOKENS, TRIAL_ROUNDS = 2, 2  # in the first of a trial's rounds the drafter has to catch up
HOPED_GAIN = 0.3 * 64  # rounds that a sequence which is drafted well is hoped to save


class Budget:
    """Decides which sequence that is not drafted for is tried, and when; costs are in rounds without a draft."""

    def __init__(self) -> None:
        self.rounds = FIRST  # that may be lost now
        self.trying: int | None = None  # the sequence that is tried, for `_left` rounds more
        self.tried: int | None = None  # the one whose trial has just ended
        self.trial_tokens = TRIAL_TOKENS  # to draft in the trial's next round
        self._left = 0
        self.now = 0  # rounds that have passed
        self._cost = self._price = 0.0  # of the next trial, and of the one that runs
        self._aside = 0.0  # of the latter, what its rounds have not used
        self._waits: dict[int, tuple[int, int]] = {}  # by sequence: the round from which it may be tried, and its wait
        self._num_tried = self._num_good = 0  # sequences

    def passed(self) -> None:
        """A round has passed."""
        self.now += 1
        self.rounds = min(self.rounds + SHARE, MOST)

    def next(self, seqs: Seq[Sequence], cost: float) -> Sequence | None:
        """The sequence that is to be tried in this round, if any; `cost`: of such a trial."""
        self._cost, self.tried = cost, None
        if self.trying is not None:
            self._left -= 1
            going = next((s for s in seqs if s.seq_id == self.trying), None)
            self.trying = None if going is None else self.trying  # drafting for it pays now, or it is gone
            return going
        hopeful = cost < HOPED_GAIN * (self._num_good + 1) / (self._num_tried + 2)
        for seq in seqs:
            if seq.seq_id not in self._waits:
                self._waits[seq.seq_id] = (self.now if hopeful else self.now + FIRST_WAIT), 0
        if min(cost, MOST) > self.rounds:  # what costs more is tried as well, for costs may be wrong, but more seldom
            return None
        seq = min(seqs, key=lambda s: self._waits[s.seq_id])
        if self._waits[seq.seq_id][0] > self.now:
            return None
        self.rounds, self._price, self._aside = self.rounds - cost, cost, cost
        self.trial_tokens = TRIAL_TOKENS
        self.trying, self._left = seq.seq_id, TRIAL_ROUNDS - 1
        return seq

    def lost(self, rounds: float, right: bool) -> None:
        """A round of a trial has lost so much: it pays that, not its share of the price; one slow round, twice it.

        While drafts are `right` to their end the trial goes on, and its drafts grow: it costs little, and tells much.
        """
        share = min(self._price / TRIAL_ROUNDS, self._aside)
        self._aside -= share
        self.rounds += share - min(max(rounds, 0.0), 2.0 * self._price)
        self._left += right
        self.trial_tokens += right

    def end_trial(self) -> None:
        """End the trial that has had its rounds."""
        if self.trying is not None and self._left <= 0:
            self.tried, self.trying = self.trying, None

    @property
    def poor(self) -> float:
        """Rounds until a trial that costs as much as the next one may be made."""
        return (min(self._cost, MOST) - self.rounds) / SHARE

    def rest(self, seq_ids: Seq[int], most: int) -> int:
        """Rounds until one of these sequences may be tried, 1 to `most`."""
        due = min(self._waits.get(i, (self.now, 0))[0] for i in seq_ids) - self.now
        return round(min(max(due, self.poor, 1.0), most))

    def note(self, seq: Sequence, pays: bool) -> None:
        """Drafting for a sequence now pays, or does not."""
        _, wait = self._waits.get(seq.seq_id, (0, 0))
        if not wait:
            self._num_tried += 1
            self._num_good += pays
        vain = wait and not pays and seq.seq_id == self.tried
        wait = min(2 * wait, LAST_WAIT) if vain else FIRST_WAIT
        self._waits[seq.seq_id] = self.now + wait, wait

    def release(self, seq: Sequence) -> None:
        """The sequence is gone."""
        self._waits.pop(seq.seq_id, None)
        if self.trying == seq.seq_id:
            self.trying = None
