"""The cost of a round: the target's pass (by rows and contexts), the proposal (by steps), and the time outside models.

Costs are measured before the first round and corrected by later rounds, because a machine's memory bandwidth may change
twofold within an hour. A proposal is one call of the drafter; its steps are passes of the drafter's model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import mul

import numpy as np

from sameseed.cost.curve import LEARN, Curve, Floats, Number
from sameseed.cost.round import DraftRows, RoundCost, expected
from sameseed.spec.drafter import Round

FADE = 0.97  # factor on the weight of an observation with each later one
SETTLED = 0.4  # weight of a settled round there
FEW_TOKENS, CATCH_UP = 16, 0.5  # fewest tokens from which the catch-up cost is learned; weight of a new measurement
MICROSECOND = 1e-6
PROMPT_ROWS = 16  # rows of a prompt that may be added to a pass before any were measured
UNIT = 1024.0  # cached tokens: the unit of the context in a proposal's cost


class FadingFit:
    """Non-negative least squares with decaying weights: seconds as a sum of features times coefficients.

    Features that do not vary cannot be told apart by the data. `ridges` then decide, one regularization weight per
    feature in units of the feature's mean square: the feature with the smallest ridge gets the cost.
    """

    solve_every = 8  # later solutions change slowly, and solving takes the most time here

    def __init__(self, ridges: Seq[float]) -> None:
        size = len(ridges)
        self.seen = 0
        self.coefficients = [0.0] * size
        self._ridges = list(ridges)
        self._products = [[0.0] * size for _ in ridges]  # decayed sums of products of features
        self._seconds = [0.0] * size  # decayed sums of features times seconds

    # Lists, not arrays: with two to five features each call of NumPy would take longer than the sums.
    def at(self, features: Seq[float]) -> float:
        """Predicted seconds for these features."""
        return sum(map(mul, self.coefficients, features), 0.0)

    def correct(self, features: Seq[float], seconds: float) -> None:
        """Add an observation. After 6 of them it is clamped to between half and twice the predicted seconds."""
        self.seen += 1
        if self.seen > 6:  # so that one slow round on a busy machine changes little
            expected = self.at(features)
            if expected > 0.0:
                seconds = min(max(seconds, 0.5 * expected), 2.0 * expected)
        for row, x in zip(self._products, features, strict=True):
            row[:] = [FADE * p + x * y for p, y in zip(row, features, strict=True)]
        self._seconds = [FADE * s + x * seconds for s, x in zip(self._seconds, features, strict=True)]
        if self.seen < 16 or self.seen % self.solve_every == 0:
            self._solve()

    def scale(self, factor: float) -> None:
        """Multiply all predicted times by `factor`."""
        self.coefficients = [factor * c for c in self.coefficients]
        self._seconds = [factor * s for s in self._seconds]

    def as_array(self) -> Floats:
        """The whole state as one flat array."""
        return np.array([self.seen, *self.coefficients, *self._seconds, *chain.from_iterable(self._products)])

    def restore(self, array: Floats) -> None:
        """Take over the state in `array` (see `as_array`)."""
        size = len(self.coefficients)
        self.seen, flat = int(array[0]), array[1:].tolist()
        self.coefficients, self._seconds, flat = flat[:size], flat[size : 2 * size], flat[2 * size :]
        self._products = [flat[i : i + size] for i in range(0, size**2, size)]

    def _solve(self) -> None:
        """Least squares; terms whose coefficient would be negative are left out, the most negative first."""
        one = max(self._products[0][0], 1e-9)
        terms = [i for i in range(len(self.coefficients)) if self._products[i][i] > 0.0]
        self.coefficients = [0.0] * len(self.coefficients)
        while terms:
            table = [[self._products[i][j] * (1.0 + self._ridges[i] / one * (i == j)) for j in terms] for i in terms]
            found = np.linalg.solve(table, [self._seconds[i] for i in terms]).tolist()
            least = min(range(len(terms)), key=found.__getitem__)
            if found[least] >= 0.0:
                for i, value in zip(terms, found, strict=True):
                    self.coefficients[i] = value
                return
            del terms[least]


class DraftCost(FadingFit):
    """Seconds of a proposal for B sequences by its steps: passes of the drafter's model, or levels of a tree.

    (start + per sequence * B) + (step + B * (per sequence + per 1024 cached tokens * context / 1024)) * steps.
    If draft lengths hardly vary, the time is attributed to the steps, or to the start for a drafter that drafts all
    tokens `at_once`.
    """

    def __init__(self, at_once: bool = False) -> None:
        super().__init__((1e-6, 0.1, 1.0, 1.0, 1.0) if at_once else (1.0, 1.0, 1e-6, 0.1, 1.0))
        self.at_once = at_once

    def terms(self, num_seqs: float, context: float = 0.0) -> tuple[float, float]:
        """Seconds before the first step, and seconds per step; `context`: mean cached tokens per sequence."""
        start, start_seq, step, step_seq, token = self.coefficients
        return start + start_seq * num_seqs, step + num_seqs * (step_seq + token * context / UNIT)

    def learn(self, steps: float, num_seqs: float, context: float, seconds: float) -> None:
        """Learn from a proposal that took `seconds`. With 0 steps (nothing was drafted) all of it is the start."""
        self.correct((1.0, num_seqs, steps, steps * num_seqs, steps * num_seqs * context / UNIT), seconds)


class PromptCost(FadingFit):
    """Seconds that rows of prompts add to a pass, each by the tokens before it: row + per 1024 tokens * tokens / 1024.

    Learned from passes whose prompts take, or were to take, at least a quarter of `limit` seconds: few rows cost less
    each than many, since weights are read once for all rows.
    """

    solve_every = 1  # such passes are long, and the tokens before a prompt's rows change with each

    def __init__(self, limit: float) -> None:
        super().__init__((1e-6, 0.1))
        self.limit = limit
        self.plain = 0.0  # seconds of passes without prompts
        self.most = PROMPT_ROWS  # rows for which the time is known: at most twice as many as were measured

    def seconds(self, num_rows: int, num_cached: int) -> float:
        """What `num_rows` rows of a prompt add to a pass, after `num_cached` tokens; infinite beyond what is known."""
        return num_rows * self.at((1.0, (num_cached + num_rows / 2) / UNIT)) if num_rows <= self.most else math.inf

    def passed(self, seconds: float) -> None:
        """Learn from a pass without prompts."""
        self.plain += (LEARN if self.plain else 1.0) * (seconds - self.plain)

    def learn(self, chunks: Seq[tuple[int, int]], seconds: float) -> None:
        """Learn from a pass of `seconds`; `chunks`: rows of each prompt, and cached tokens before them."""
        rows = sum(n for n, _ in chunks)
        context = sum(n * (cached + n / 2) for n, cached in chunks) / rows / UNIT
        expected, added = rows * self.at((1.0, context)), max(0.0, seconds - self.plain)
        if max(expected, added) >= self.limit / 4:
            self.correct((1.0, context), added / rows)
        self.most = max(self.most, 2 * rows)


class GapCost:
    """Seconds outside the models (Python, scheduling) by the rows of a round: a base, plus seconds per row.

    Rounds with and without a draft have separate fits, so that the fit of a rarely seen kind does not decay.
    """

    def __init__(self) -> None:
        self.plain, self.drafted = (FadingFit((1e-6, 0.1)) for _ in range(2))

    @property
    def seen(self) -> int:
        return self.plain.seen + self.drafted.seen

    def terms(self, drafted: bool) -> tuple[float, float]:
        """Seconds per round and per row; a kind of round not seen yet takes the other kind's."""
        fit, other = (self.drafted, self.plain) if drafted else (self.plain, self.drafted)
        base, row = (fit if fit.seen else other).coefficients
        return base, row

    def at(self, rows: Number, drafted: bool) -> Number:
        """Seconds of a round over `rows` rows; one with a draft takes no less than one without."""
        base, row = self.terms(drafted)
        if not drafted:
            return base + row * rows
        found, least = base + row * rows, self.at(rows, False)
        return np.maximum(found, least) if isinstance(found, np.ndarray) else max(found, least)

    def correct(self, rows: float, drafted: bool, seconds: float) -> None:
        """Learn from a round that spent `seconds` outside the models."""
        (self.drafted if drafted else self.plain).correct((1.0, rows), seconds)


@dataclass
class EngineCost:
    """Seconds of whole rounds: passes of the target, proposals, and the gap between passes (Python, scheduling).

    `ratios`: measured over expected time of whole rounds, by (with a draft?, bit length of the batch size).
    """

    target: Curve
    draft: DraftCost = field(default_factory=DraftCost)
    gap: GapCost = field(default_factory=GapCost)
    catch_up: float = 0.0  # seconds per token that the drafter has not processed yet when it is asked
    ratios: dict[tuple[bool, int], float] = field(default_factory=dict)

    def seconds(self, steps: float, batch: float, context: float, decided: float = 1.0) -> float:
        """Seconds of a proposal, as `Proposal` has them."""
        start, step = self.draft.terms(batch, context)
        return start + step * steps

    def prompt(self, tokens: float) -> float:
        return self.catch_up * tokens

    def as_arrays(self) -> dict[str, Floats]:
        """The costs of the models' passes as arrays, for another process; times between passes are of one hour only."""
        return {
            "target": np.array([self.target.rows, self.target.seconds]),
            "contexts": np.array([self.target.context, self.target.per_token, self.target.per_row]),
            "catch_up": np.array([self.catch_up]),
            "draft": self.draft.as_array(),
            "at_once": np.array([float(self.draft.at_once)]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Floats]) -> EngineCost:
        """The inverse of `as_arrays`."""
        context, per_token, per_row = arrays["contexts"].tolist()
        curve = Curve(list(zip(*arrays["target"].tolist(), strict=True)), int(context), per_token, per_row)
        cost = cls(curve, DraftCost(bool(arrays["at_once"][0])), catch_up=float(arrays["catch_up"][0]))
        cost.draft.restore(arrays["draft"])
        return cost

    def scale(self, factor: float) -> None:
        """Multiply the times of the models' passes by `factor`; the gap between passes is unchanged."""
        self.target.scale(factor)
        self.draft.scale(factor)
        self.catch_up *= factor

    def learn_catch_up(self, num_tokens: int, seconds: float) -> None:
        """Learn from `seconds` that a drafter took to catch up with `num_tokens`, without its proposals' time."""
        if num_tokens >= FEW_TOKENS:
            found = min(max(seconds, 0.0) / num_tokens, 2.0 * self.catch_up + MICROSECOND)
            self.catch_up += CATCH_UP * (found - self.catch_up)

    def ratio(self, drafted: bool, num_seqs: int) -> float:
        """Measured over expected time of such rounds; a batch size not seen yet takes the nearest one's."""
        size = num_seqs.bit_length()
        near = min((key for key in self.ratios if key[0] == drafted), key=lambda key: abs(key[1] - size), default=None)
        return 1.0 if near is None else self.ratios[near]

    def now(self, count: int, rows: int, measured: bool = True) -> RoundCost:
        """The costs of rounds of `count` sequences in a pass over `rows` known rows. `measured`: apply the `ratios`?"""
        passes = self.target if rows <= count else self.target.beside(count, rows - count)
        ratios = (self.ratio(False, count), self.ratio(True, count)) if measured else (1.0, 1.0)
        return RoundCost(passes, (self,), self.gap, ratios=ratios)

    def row(self, context: float) -> float:
        """Seconds of one more draft row after `context` cached tokens, beside those of the target's curve."""
        return self.gap.terms(True)[1] + self.target.extra(1, 0, context)

    def learn(
        self,
        round_: Round,
        steps: float,
        catching_up: bool,
        start: bool = False,
        settled: bool = False,
        draft: DraftCost | None = None,
    ) -> None:
        """Learn from the times of a round; `steps`: drafting steps of its proposal.

        A proposal in which the drafter was `catching_up` is not learned from: later proposals do not repeat that. At
        the `start` a deviation is taken as the speed of the whole machine, so all model costs are scaled by it.
        `settled`: a plain round measured on purpose, with warm caches. It counts more in `ratios`, and may halve one at
        once, since nothing makes such a round too fast by chance. `draft`: the cost of such proposals, which learns.
        """
        times, num_seqs, num_nodes = round_.times, len(round_.seqs), sum(round_.num_draft)
        assert times is not None
        contexts = [len(seq) for seq in round_.seqs]
        asking = [n for n, k in zip(contexts, round_.num_asked, strict=True) if k]
        drafted, context = bool(asking), sum(contexts) / max(1, num_seqs)
        if round_.num_rows == num_seqs + num_nodes and not catching_up:  # a pass without prompts
            cost = replace(self, draft=draft or self.draft).now(num_seqs, num_seqs, measured=False)
            rows = DraftRows(0.0, num_nodes / num_seqs, steps, len(asking))
            seconds = expected(cost, rows, int(drafted), num_seqs, context).seconds
            key = (drafted, num_seqs.bit_length())
            known = self.ratios.get(key, 1.0)
            weight, least = (SETTLED, 0.5) if settled else (LEARN, 0.8)
            self.ratios[key] = known + weight * (min(max(times.whole / seconds, least * known), 1.25 * known) - known)
        if drafted and not catching_up:
            (draft or self.draft).learn(steps, len(asking), sum(asking) / len(asking), times.draft)
        self.gap.correct(num_seqs + num_nodes, drafted, times.verify + times.schedule)
        if round_.num_rows <= 2 * self.target.rows[-1]:
            extra = self.target.extra(num_seqs + num_nodes, num_seqs, context)
            if start:
                self.scale(1.0 + self.target.slower(round_.num_rows, times.target, extra))
            else:
                self.target.correct(round_.num_rows, times.target, extra)
