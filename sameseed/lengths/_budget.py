"""The exploration budget: how much time trial drafts may lose while drafting does not pay.

This is a bandit with a baseline (Wu et al., "Conservative Bandits", 2016). The baseline is plain decoding. Drafts that
are expected to lose time are tried only while the loss stays within a share `SHARE` of all rounds so far. So a workload
in which drafting never pays loses no more than that share.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sameseed.request import Sequence

SHARE = 0.0075  # of all rounds: what trials may lose
FIRST, MOST = 2.0, 8.0  # the budget at the start and at most, in rounds without a draft
FIRST_WAIT, LAST_WAIT = 16, 512  # rounds before a sequence is tried again: first and longest; a failed trial doubles it
TRIAL_TOKENS, TRIAL_ROUNDS = 2, 2  # draft tokens and rounds of a trial; in its first round the drafter catches up
HOPED_GAIN = 0.3 * 64  # rounds that drafting is hoped to save for a sequence where it pays


class Budget:
    """Decides which sequence without drafts gets a trial, and when. Costs are counted in rounds without a draft."""

    def __init__(self) -> None:
        self.rounds = FIRST  # the budget: rounds that may be lost now
        self.trying: int | None = None  # the sequence whose trial runs, for `_left` more rounds
        self.tried: int | None = None  # the sequence whose trial has just ended
        self.trial_tokens = TRIAL_TOKENS  # draft tokens in the trial's next round
        self._left = 0
        self.now = 0  # rounds so far
        self._cost = self._price = 0.0  # estimated cost of the next trial; price of the running trial
        self._aside = 0.0  # the part of `_price` that the trial's rounds have not used yet
        self._waits: dict[int, tuple[int, int]] = {}  # by sequence: the first round for a trial, and the waiting time
        self._num_tried = self._num_good = 0  # sequences with a first decision, and those for which drafting paid

    def passed(self) -> None:
        """Count a round, and add its share to the budget."""
        self.now += 1
        self.rounds = min(self.rounds + SHARE, MOST)

    def next(self, seqs: Seq[Sequence], cost: float) -> Sequence | None:
        """The sequence to try drafting for in this round, or None; `cost`: the expected loss of a trial."""
        self._cost, self.tried = cost, None
        if self.trying is not None:
            self._left -= 1
            going = next((s for s in seqs if s.seq_id == self.trying), None)
            self.trying = None if going is None else self.trying  # None: drafting pays for it now, or it ended
            return going
        hopeful = cost < HOPED_GAIN * (self._num_good + 1) / (self._num_tried + 2)
        for seq in seqs:
            if seq.seq_id not in self._waits:
                self._waits[seq.seq_id] = (self.now if hopeful else self.now + FIRST_WAIT), 0
        if min(cost, MOST) > self.rounds:  # dearer trials are rare, but made: the estimate may be wrong
            return None
        seq = min(seqs, key=lambda s: self._waits[s.seq_id])
        if self._waits[seq.seq_id][0] > self.now:
            return None
        self.rounds, self._price, self._aside = self.rounds - cost, cost, cost
        self.trial_tokens = TRIAL_TOKENS
        self.trying, self._left = seq.seq_id, TRIAL_ROUNDS - 1
        return seq

    def lost(self, rounds: float, right: bool) -> None:
        """Charge what a round of a trial lost, in place of that round's share of the trial's price.

        The charge is at most twice the price, so that one slow round cannot use up the budget. `right`: the whole draft
        was accepted. Then the trial gets one more round and one more draft token: this costs little and tells much.
        """
        share = min(self._price / TRIAL_ROUNDS, self._aside)
        self._aside -= share
        self.rounds += share - min(max(rounds, 0.0), 2.0 * self._price)
        self._left += right
        self.trial_tokens += right

    def end_trial(self) -> None:
        """End the running trial if it has had all its rounds."""
        if self.trying is not None and self._left <= 0:
            self.tried, self.trying = self.trying, None

    @property
    def poor(self) -> float:
        """Rounds until the budget covers the next trial's estimated cost; negative if it covers more."""
        return (min(self._cost, MOST) - self.rounds) / SHARE

    def rest(self, seq_ids: Seq[int], most: int) -> int:
        """Rounds until one of these sequences may be tried, in 1..`most`."""
        due = min(self._waits.get(i, (self.now, 0))[0] for i in seq_ids) - self.now
        return round(min(max(due, self.poor, 1.0), most))

    def note(self, seq: Sequence, pays: bool) -> None:
        """Record whether drafting now pays for a sequence, and set when the sequence may be tried (again)."""
        _, wait = self._waits.get(seq.seq_id, (0, 0))
        if not wait:
            self._num_tried += 1
            self._num_good += pays
        vain = wait and not pays and seq.seq_id == self.tried
        wait = min(2 * wait, LAST_WAIT) if vain else FIRST_WAIT
        self._waits[seq.seq_id] = self.now + wait, wait

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._waits.pop(seq.seq_id, None)
        if self.trying == seq.seq_id:
            self.trying = None
