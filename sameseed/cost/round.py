"""RoundCost: what a round costs, on paper, from a profile or from passes that ran; `expected`: what it then brings.

A round is one pass of the target with its proposal. It pays where its tokens exceed the ratio of its time to that of
plain decoding (Leviathan et al., 2023, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import numpy as np

from sameseed.tuned import TABLE_END

PAYS = 1.02  # speed-up over plain decoding from which drafts are advised: benches of one setting differ by as much
MAX_NUM_ROWS = 512  # of a pass over a prompt, as in EngineConfig


class Passes(Protocol):
    """Passes of a model."""

    def cost(self, rows: float, batch: float = 1.0, context: float = 0.0) -> float:
        """Seconds of a pass over `rows` rows in all, of `batch` sequences with `context` cached tokens each."""


class Proposal(Protocol):
    """Proposals of one draft level."""

    def seconds(self, steps: float, batch: float, context: float, decided: float = 1.0) -> float:
        """Seconds of a proposal for `batch` sequences; `decided`: tokens of each since the last one."""

    def prompt(self, tokens: float) -> float:
        """Seconds in which the level reads a prompt."""


class Between(Protocol):
    """Time outside the models: Python, launches, sampling."""

    def at(self, rows: float, drafted: bool) -> float:
        """Seconds of a round with `rows` rows, with a draft or without."""


@dataclass(frozen=True)
class Gap:
    """Constant seconds outside the models, of rounds without a draft and with one."""

    plain: float = 0.0
    drafted: float = 0.0

    def at(self, rows: float, drafted: bool) -> float:
        return self.drafted if drafted else self.plain


@dataclass(frozen=True)
class ModelSteps:
    """Proposals of a model: one pass for each draft token, or one for all (`at_once`).

    The first pass reads the tokens decided since the last proposal. `start` and `each`: seconds of a proposal, and of
    each of its sequences, beside its passes; without `passes` (a search in the text) there is nothing else.
    """

    passes: Passes | None = None
    at_once: bool = False
    start: float = 0.0
    each: float = 0.0

    def seconds(self, steps: float, batch: float, context: float, decided: float = 1.0) -> float:
        found = self.start + self.each * batch
        if self.passes is None or not steps:
            return found
        if self.at_once:
            return found + self.passes.cost(batch * (decided + steps - 1.0), batch, context)
        first = self.passes.cost(batch * min(2.0, decided), batch, context)
        return found + first + (steps - 1.0) * self.passes.cost(batch, batch, context)

    def prompt(self, tokens: float) -> float:
        return read(self.passes, tokens) if self.passes is not None else 0.0


@dataclass(frozen=True)
class RoundCost:
    """Seconds of the parts of a round. `levels`: proposals, the lowest level first; the last one serves all above it.

    `prompts`: seconds of the passes over a prompt of so many tokens; None: as other passes. `grade`: "paper" (bytes and
    operations), "profiled" (measured passes) or "measured". `spread`: how far passes are off, as the standard deviation
    of the logarithm of their seconds. `ratios`: measured over expected seconds of rounds without a draft, and with one.
    """

    passes: Passes
    levels: tuple[Proposal, ...] = ()
    gap: Between = Gap()
    prompts: Callable[[float], float] | None = None
    grade: str = "measured"
    spread: float = 0.0
    ratios: tuple[float, float] = (1.0, 1.0)

    def target(self, rows: float, batch: float = 1.0, context: float = 0.0) -> float:
        """Seconds of a pass of the target."""
        return self.passes.cost(rows, batch, context)

    def draft(
        self, steps: float, batch: float = 1.0, context: float = 0.0, decided: float = 1.0, level: int = 0
    ) -> float:
        """Seconds of a proposal of one level; 0 where there is none."""
        if not self.levels:
            return 0.0
        return self.levels[min(level, len(self.levels) - 1)].seconds(steps, batch, context, decided)

    def prompt(self, tokens: float, drafted: bool = False) -> float:
        """Seconds of the passes over a prompt; with those of the draft's models, if it is `drafted` for."""
        own = read(self.passes, tokens) if self.prompts is None else self.prompts(tokens)
        return own + (sum(level.prompt(tokens) for level in self.levels) if drafted else 0.0)


def read(passes: Passes, tokens: float) -> float:
    """Seconds of the passes over a prompt, MAX_NUM_ROWS rows each."""
    starts = range(0, math.ceil(tokens), MAX_NUM_ROWS)
    return sum(passes.cost(min(MAX_NUM_ROWS, tokens - at), 1.0, at) for at in starts)


@dataclass(frozen=True)
class Drafted:
    """The rounds of a sequence: mean accepted draft tokens, and the share of rounds with 0, 1, 2, ... drafted rows.

    A lookup often finds nothing: passes over 1 and 9 rows in turn take another time than passes over 5. `levels`: for
    each draft level the share of rounds that use it, and its steps in these.
    """

    accepted: float
    lengths: tuple[float, ...]
    levels: tuple[tuple[float, float], ...]

    @property
    def rows(self) -> float:
        """Mean drafted rows."""
        return sum(n * share for n, share in enumerate(self.lengths))

    def passes(self, batch: float) -> list[tuple[float, float]]:
        """The rows of passes of `batch` sequences that draft independently of each other, and the share of each."""
        if max(self.lengths) == 1.0:
            return [(batch * (1.0 + self.rows), 1.0)]
        count = max(1, round(batch))
        shares = reduce(np.convolve, [self.lengths] * count, np.ones(1))
        return [(batch * (1.0 + n / count), float(share)) for n, share in enumerate(shares) if share]

    def proposals(self, batch: float) -> list[tuple[float, float, float]]:
        """For each level: the share of rounds with a proposal, how many sequences it is for, and its steps."""
        found = []
        for share, steps in self.levels:
            used = 1.0 - (1.0 - min(share, 1.0)) ** batch  # chance that a sequence of the batch uses the level
            found.append((used, batch * share / used if used else 0.0, steps))
        return found


@dataclass(frozen=True)
class DraftRows:
    """Rounds with drafts for `drafting` sequences of a batch, made in `steps` steps. `found`: the chance of a draft.

    `accepted`, `rows`: accepted and drafted tokens over all sequences of the batch. Arrays stand for several rounds,
    which are compared at once.
    """

    accepted: Any
    rows: Any
    steps: Any
    drafting: float
    found: float = 1.0

    def drafted(self, k: int) -> DraftRows:
        return self

    def proposals(self, batch: float) -> list[tuple[float, float, Any]]:
        return [(1.0, self.drafting, self.steps)]

    def passes(self, batch: float) -> list[tuple[Any, float]]:
        drafted = (batch * (1.0 + self.rows / self.found), self.found)
        return [drafted] if self.found == 1.0 else [(batch, 1.0 - self.found), drafted]


class DraftAcceptance(Protocol):
    """What drafts of any length bring."""

    def drafted(self, k: int) -> Drafted | DraftRows:
        """The mean round with drafts of at most `k` tokens."""


@dataclass(frozen=True)
class PlaceRates:
    """Acceptance by place: the rate of a draft token where all before it were accepted; the last rate repeats."""

    rates: Seq[float]

    def drafted(self, k: int) -> Drafted:
        alive, accepted = 1.0, 0.0
        for i in range(k):
            alive *= self.rates[min(i, len(self.rates) - 1)]
            accepted += alive
        return Drafted(accepted, (*[0.0] * k, 1.0), ((1.0, k),))


NOTHING = PlaceRates((0.0,))


@dataclass(frozen=True)
class Expected:
    """A round of `batch` sequences and a plain one: tokens of each sequence, and seconds of the parts.

    `k`: the most draft tokens of each. Several rounds (`DraftRows`) have arrays.
    """

    tokens: float
    target: float
    draft: float
    gap: float
    plain_target: float
    plain_gap: float
    batch: float = 1.0
    k: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the round."""
        return self.target + self.draft + self.gap

    @property
    def plain(self) -> float:
        """Seconds of a round without a draft."""
        return self.plain_target + self.plain_gap

    @property
    def speedup(self) -> float:
        """Tokens a second over those of plain decoding, prompts aside."""
        return self.tokens * self.plain / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all sequences, prompts aside."""
        return self.batch * self.tokens / self.seconds

    def whole(self, prompt: float, drafted_prompt: float, num_tokens: float) -> float:
        """The speed-up of `num_tokens` tokens after a prompt, whose passes take so long without and with a draft."""
        before = prompt + num_tokens * self.plain
        return before / (drafted_prompt + num_tokens / self.tokens * self.seconds)


def expected(cost: RoundCost, acceptance: DraftAcceptance, k: int, batch: float, context: float = 0.0) -> Expected:
    """What rounds of `batch` sequences cost and bring, with drafts of at most `k` tokens each."""
    without, ratio = cost.ratios
    plain = without * cost.target(batch, batch, context), without * cost.gap.at(batch, False)
    if not k:
        return Expected(1.0, plain[0], 0.0, plain[1], *plain, batch)
    of, draft = acceptance.drafted(k), 0.0
    for level, (used, count, steps) in enumerate(of.proposals(batch)):
        if used > 0.0:
            draft += used * cost.draft(steps, count, context, 1.0 + of.accepted, level)
    target = sum(share * cost.target(rows, batch, context) for rows, share in of.passes(batch))
    gap = cost.gap.at(batch * (1.0 + of.rows), True)
    return Expected(1.0 + of.accepted, ratio * target, ratio * draft, ratio * gap, *plain, batch, k)


def best(
    cost: RoundCost, acceptance: DraftAcceptance, ks: Seq[int], batch: float, context: float = 0.0, least: float = PAYS
) -> tuple[int, float]:
    """The draft length with the highest speed-up, and that speed-up; (0, 1.0) where none reaches `least`."""
    found = [(expected(cost, acceptance, k, batch, context).speedup, -k) for k in ks]
    speed, k = max(found, default=(0.0, 0))
    return (-k, speed) if speed >= least else (0, 1.0)


def lengths_by_batch(
    cost: RoundCost, acceptance: DraftAcceptance, ks: Seq[int], most: int, context: float = 0.0
) -> tuple[tuple[int, int, int], ...]:
    """Best lengths by number of sequences, as (first, last, length); the last row ends at TABLE_END."""
    lengths = [best(cost, acceptance, ks, b, context)[0] for b in range(1, most + 1)]
    starts = [i for i in range(most) if i == 0 or lengths[i] != lengths[i - 1]]
    ends = [*starts[1:], TABLE_END]
    return tuple((i + 1, end, lengths[i]) for i, end in zip(starts, ends, strict=True))
