"""Trials: what a draft brings, counted in short runs on the user's prompts.

The longest run of a chain tells for shorter ones too: cut to k tokens, a round drafts and accepts at most k. Trees are
not cut, so each of their sizes runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sameseed.cost.round import Drafted
from sameseed.measure.bench import Run
from sameseed.tuned import AcceptRates


@dataclass(frozen=True)
class TrialRun:
    """The rounds of one run, without the first of each output, which the prompt's pass decides.

    `drafts` int [n, 2]: drafted and accepted tokens of each round with a draft. `shares`: for each drafter that is
    asked in turn, the share of rounds with a draft of its own.
    """

    num_rounds: int
    drafts: NDArray[np.int64]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, run: Run, in_turn: bool) -> TrialRun:
        """`in_turn`: does the drafter ask others in turn, which have counts of their own?"""
        num_rounds = max(1, run.metrics.num_rounds - len(run.completions))
        pairs = [pair for done in run.completions for pair in done.metrics.spec.rounds or ()]
        counts = [m.num_drafts for m in run.levels.values()] if in_turn else [len(pairs)]
        return cls(num_rounds, np.array(pairs, np.int64).reshape(-1, 2), tuple(n / num_rounds for n in counts))


@dataclass(frozen=True)
class Trial:
    """The runs of a draft, by draft tokens (nodes of a tree). `deepest`: most steps in which a draft is made."""

    runs: Mapping[int, TrialRun]
    deepest: int

    def _cut(self, k: int) -> tuple[TrialRun, NDArray[np.int64]]:
        """The shortest run with drafts of at least `k` tokens, and its drafts cut to them."""
        run = self.runs[min((size for size in self.runs if size >= k), default=max(self.runs))]
        return run, np.minimum(run.drafts, k)

    def drafted(self, k: int) -> Drafted:
        """The mean round with drafts of at most `k` tokens, for `expected`."""
        run, drafts = self._cut(k)
        counts = np.bincount(drafts[:, 0], minlength=1)
        counts[0] = run.num_rounds - len(drafts)
        steps = min(float(drafts[:, 0].mean()), self.deepest) if len(drafts) else 0.0
        accepted = float(drafts[:, 1].sum()) / run.num_rounds
        return Drafted(accepted, tuple((counts / run.num_rounds).tolist()), tuple((s, steps) for s in run.shares))

    def rates(self, k: int) -> AcceptRates:
        """How often each place of drafts of at most `k` tokens was accepted."""
        run, drafts = self._cut(k)
        accepted = drafts[:, 1]
        alive = [run.num_rounds, *(int((accepted > i).sum()) for i in range(int(accepted.max(initial=0))))]
        conditional = tuple(now / before for before, now in pairwise(alive))
        marginal = tuple(n / run.num_rounds for n in alive[1:])
        return AcceptRates(conditional, marginal, 1.0 + float(accepted.sum()) / run.num_rounds, run.num_rounds)
