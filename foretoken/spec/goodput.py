"""Goodput: in each round as many draft tokens as pay, none included (TurboSpec: Liu et al., 2024; DSpark, 2026).

A round's worth is the tokens that it may be expected to decide over the time that it takes. Times come from measured
passes and are corrected by every round; acceptance is estimated for each request and position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.request import Sequence
from foretoken.spec.length import Round

POSITIONS = 16  # estimates are kept for so many; those beyond share the last one's
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 2.0  # before anything is known: a draft token is taken to be right so often
OWN_WEIGHT = 3.0  # observations of its own that outweigh what other requests showed
DECAY = 0.92  # of what a request showed, a round later
DECAY_OF_ALL = 0.99  # of what all did, a request and round later
MARGIN = 0.02  # drafting must promise so much more than not drafting
FIRST_PROBE, LAST_PROBE = 16, 512  # rounds without a draft before it is tried again, doubled each time in vain
PROBE_TOKENS = 2
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # longest drafts that are compared


class Curve:
    """Seconds of a pass by its rows: straight lines between measured points, which later rounds correct."""

    def __init__(self, points: Seq[tuple[int, float]]) -> None:
        """`points`: (rows, seconds), ascending in rows; made to ascend in seconds: a larger pass is no faster."""
        self.rows = [float(r) for r, _ in points]
        self.seconds = [s for _, s in points]
        self._ascend()

    def _ascend(self) -> None:
        for i in range(1, len(self.seconds)):
            self.seconds[i] = max(self.seconds[i], self.seconds[i - 1])

    def at(self, rows: float) -> float:
        """Seconds of a pass over `rows` rows; beyond the last point it goes on as between the last two."""
        xs, ys = self.rows, self.seconds
        if len(xs) == 1:
            return ys[0]
        i = min(max(bisect_right(xs, rows), 1), len(xs) - 1)
        share = (rows - xs[i - 1]) / (xs[i] - xs[i - 1])
        return max(ys[0], ys[i - 1] + share * (ys[i] - ys[i - 1])) if rows > xs[0] else ys[0]

    def at_many(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """`at` of several, ascending."""
        xs, ys = self.rows, self.seconds
        found: NDArray[np.float64] = np.interp(rows, xs, ys)
        if len(xs) > 1 and rows[-1] > xs[-1]:
            slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
            found = found + slope * np.maximum(rows - xs[-1], 0.0)
        return found

    def correct(self, rows: float, seconds: float, weight: float = 0.1) -> None:
        """A pass took so long: move the points on both sides of it, and a little the whole curve (contexts grow)."""
        expected = self.at(rows)
        ratio = min(max(seconds / expected, 0.5), 2.0)  # one slow round, of a busy machine, should not decide
        i = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1) if len(self.rows) > 1 else 0
        near = {max(i - 1, 0), i}
        for j in range(len(self.seconds)):
            self.seconds[j] *= 1.0 + (weight if j in near else weight / 4) * (ratio - 1.0)
        self._ascend()


@dataclass
class DraftCost:
    """Seconds of a proposal, start + step * (tokens of the longest draft): two running means, no more is needed."""

    start: float = 0.0
    step: float = 0.0
    seen: int = 0

    def at(self, steps: int) -> float:
        """Seconds of drafting up to `steps` tokens for each sequence."""
        return self.start + self.step * steps if steps > 0 else 0.0

    def correct(self, steps: int, seconds: float) -> None:
        """A proposal of `steps` tokens took so long."""
        self.seen += 1
        weight = max(0.1, 1.0 / self.seen)
        off = min(seconds - self.at(steps), 4.0 * self.at(steps) if self.seen > 3 else seconds)
        # Of what was off a tenth goes to the start: nearly all of a model's drafting is its passes.
        self.start = max(0.0, self.start + weight * 0.1 * off)
        self.step = max(0.0, self.step + weight * 0.9 * off / steps)


class Counts:
    """By position of a draft: how often it was asked for, drafted, reached (all before it right), and right."""

    def __init__(self, positions: int, decay: float) -> None:
        self.decay = decay
        self.asked, self.drafted, self.reached, self.right = ([0.0] * positions for _ in range(4))

    def add(self, asked: int, drafted: int, accepted: int) -> None:
        """One round of one sequence."""
        decay = self.decay
        for counts, most in (
            (self.asked, asked),
            (self.drafted, drafted),
            (self.reached, min(drafted, accepted + 1)),
            (self.right, accepted),
        ):
            counts[:] = [c * decay + (j < most) for j, c in enumerate(counts)]


class GoodputLength:
    """Decides lengths from costs and acceptance; `num_draft_tokens` is the most. One engine's own: it learns."""

    uses_confidence = False

    def __init__(self, num_draft_tokens: int, target: Curve | None = None) -> None:
        """`target`: seconds of the target's passes; None: learned from the first rounds and a guess of their shape."""
        self.num_draft_tokens = num_draft_tokens
        self.target = target
        self.draft = DraftCost()
        self.rest = 0.0  # seconds of a round outside both models
        self._positions = max(1, min(num_draft_tokens, POSITIONS))
        self._all = Counts(self._positions, DECAY_OF_ALL)
        self._own: dict[int, Counts] = {}
        self._idle: dict[int, list[int]] = {}  # rounds without a draft, and how many until it is tried

    def stop(self, confidence: float) -> bool:
        return False

    def lengths(self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None) -> list[int]:
        """Lengths that promise the most tokens a second; at most `budget` draft tokens in all."""
        most = self.num_draft_tokens
        if most == 0 or not seqs:
            return [0] * len(seqs)
        if self.target is None or self.draft.seen < 2:  # the first rounds tell what things cost
            return self._within([min(most, 4)] * len(seqs), budget)
        lengths = self._best(seqs, num_rows or len(seqs), budget)
        return self._within([self._probed(seq, k) for seq, k in zip(seqs, lengths, strict=True)], budget)

    def _within(self, lengths: list[int], budget: int | None) -> list[int]:
        left = sum(lengths) if budget is None else budget
        for b, k in enumerate(lengths):
            lengths[b] = min(k, left)
            left -= lengths[b]
        return lengths

    def _best(self, seqs: Seq[Sequence], rows: int, budget: int | None) -> list[int]:
        """Lengths that promise the most, or none where that is not clearly more than plain decoding promises."""
        assert self.target is not None
        if len(seqs) == 1:
            return [self._best_alone(seqs[0], rows, budget)]
        most = self.num_draft_tokens
        table = np.array([self._offers(seq) for seq in seqs])  # [B, k, 2]: gain of a row there, rows (part of one)
        # The likeliest rows first; a row comes after its parent, which is at least as likely.
        order = np.argsort(-table[:, :, 0], axis=None, kind="stable")
        owner, position = order // most, order % most
        gain, share = table[owner, position].T
        plain = len(seqs) / (self.target.at(rows) + self.rest)
        best, promised = [0] * len(seqs), plain * (1.0 + MARGIN)
        # A step of drafting serves all sequences: it pays for few likely tokens, or for many less likely ones.
        for depth in {min(d, most) for d in DEPTHS}:
            taken = (position < depth).nonzero()[0][:budget]
            if not len(taken):
                continue
            tokens = len(seqs) + np.cumsum(gain[taken] * share[taken])
            seconds = self.target.at_many(rows + np.cumsum(share[taken])) + self.rest
            steps = np.maximum.accumulate(position[taken]) + 1
            worth = tokens / (seconds + self.draft.start + self.draft.step * steps)
            last = int(worth.argmax())
            if worth[last] > promised:
                promised = float(worth[last])
                best = np.bincount(owner[taken[: last + 1]], minlength=len(seqs)).tolist()
        return best

    def _best_alone(self, seq: Sequence, rows: int, budget: int | None) -> int:
        """The same for one sequence, without the arrays, which cost more than they save."""
        assert self.target is not None
        tokens, expected_rows, best = 1.0, float(rows), 0
        promised = (1.0 + MARGIN) / (self.target.at(rows) + self.rest)
        for j, (gain, share) in enumerate(self._offers(seq)[:budget]):
            tokens += gain * share
            expected_rows += share
            worth = tokens / (self.target.at(expected_rows) + self.draft.at(j + 1) + self.rest)
            if worth > promised:
                promised, best = worth, j + 1
        return best

    def _offers(self, seq: Sequence) -> list[tuple[float, float]]:
        """For each position of a draft: how likely it and all before are right, and how likely there is one."""
        gain, offers = 1.0, []
        for j in range(self.num_draft_tokens):
            rate, share = self._rates(seq, j)
            gain *= rate
            offers.append((gain, share))
        return offers

    def _rates(self, seq: Sequence, position: int) -> tuple[float, float]:
        """Of the token at a position of a draft: how often right where it is reached, how often there is one at all."""
        j = min(position, self._positions - 1)
        every, own = self._all, self._own.get(seq.seq_id)
        rate = (every.right[j] + PRIOR_WEIGHT * PRIOR_RATE) / (every.reached[j] + PRIOR_WEIGHT)
        share = (every.drafted[j] + PRIOR_WEIGHT) / (every.asked[j] + PRIOR_WEIGHT)
        if own is not None:
            rate = (own.right[j] + OWN_WEIGHT * rate) / (own.reached[j] + OWN_WEIGHT)
            share = (own.drafted[j] + OWN_WEIGHT * share) / (own.asked[j] + OWN_WEIGHT)
        return rate, share

    def _probed(self, seq: Sequence, length: int) -> int:
        """`length`, or after many rounds without a draft a short one: things may have changed."""
        if length:
            self._idle.pop(seq.seq_id, None)
            return length
        idle = self._idle.setdefault(seq.seq_id, [0, FIRST_PROBE])
        idle[0] += 1
        if idle[0] < idle[1]:
            return 0
        self._idle[seq.seq_id] = [0, min(2 * idle[1], LAST_PROBE)]
        return min(PROBE_TOKENS, self.num_draft_tokens)

    def update(self, round_: Round) -> None:
        """Learn from a round: what was right, and what it took."""
        # A drafter's own prefill is paid whatever is decided. A drafter that found nothing was asked all the same.
        catching_up = any(k and s.seq_id not in self._own for s, k in zip(round_.seqs, round_.num_asked, strict=True))
        for seq, asked, drafted, accepted in zip(
            round_.seqs, round_.num_asked, round_.num_draft, round_.num_accepted, strict=True
        ):
            if asked:
                self._all.add(asked, drafted, accepted)
                own = self._own.get(seq.seq_id)
                if own is None:
                    own = self._own[seq.seq_id] = Counts(self._positions, DECAY)
                own.add(asked, drafted, accepted)
        times = round_.times
        if times is None:
            return
        longest = max(round_.num_asked, default=0)
        if longest and not catching_up:
            self.draft.correct(longest, times.draft)
        self.rest += 0.1 * (times.verify + times.schedule - self.rest)
        if self.target is None:  # in shape as measured for 8-bit weights: nearly flat, then a slope
            one = times.target / (1.0 + 0.02 * (round_.num_rows - 1))
            self.target = Curve([(m, one * (1.0 + 0.02 * (m - 1))) for m in (1, 4, 8, 16, 64)])
        elif round_.num_rows <= 2 * self.target.rows[-1]:
            self.target.correct(round_.num_rows, times.target)

    def release(self, seq: Sequence) -> None:
        """The sequence is gone."""
        self._own.pop(seq.seq_id, None)
        self._idle.pop(seq.seq_id, None)
