"""The mean round by an engine's counters, and what rounds of other draft lengths would cost and bring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from sameseed.cost.curve import Curve
from sameseed.cost.round import ModelSteps, PlaceRates, RoundCost, best, expected, lengths_by_batch
from sameseed.plan.metrics import Counted

MOST = 16  # most draft tokens considered (and at most twice those that were drafted, plus 1)
LARGEST = 64  # most sequences considered
MARGIN = 0.98  # share of break-even above which a round is held to pay


@dataclass(frozen=True)
class Rounds:
    """The rounds of an engine; seconds are of a mean round."""

    counted: Counted
    k: float  # draft tokens
    length: float  # tokens that a round with a draft decides, the bonus token included
    survival: tuple[float, ...]  # share of drafts whose token at each place was accepted
    batch: float
    round_s: float | None = None  # from one round to the next
    draft_s: float | None = None  # its parts in the models, where the engine says so
    target_s: float | None = None
    overhead_s: float | None = None
    drafted: float = 1.0  # share of rounds that had a draft
    known: RoundCost | None = None  # measured costs; where these lack a draft's, the engine's own time for it counts
    plain_tokens_per_s: float | None = None

    @property
    def now(self) -> int:
        """Draft tokens of a round, as a whole number from 1 on."""
        return round(self.k) or 1

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens."""
        return (self.length - 1.0) / self.k if self.k else 0.0

    @property
    def conditional(self) -> tuple[float, ...]:
        """The share accepted at each place where all before were."""
        before = (1.0, *self.survival)
        return tuple(s / b if b > 0 else 0.0 for s, b in zip(self.survival, before, strict=False))

    @property
    def draft_share(self) -> float | None:
        """The draft's share of a round's time."""
        return self.draft_s / self.round_s if self.draft_s is not None and self.round_s else None

    @property
    def rates(self) -> PlaceRates:
        """Acceptance by place, for `expected`; places beyond those measured get the mean rate at most."""
        rates = self.conditional
        beyond = min(rates[-1], self.survival[-1] ** (1 / len(rates)))  # the last rate may come from a few easy texts
        return PlaceRates((*rates, beyond))

    @property
    def source(self) -> str | None:
        """Where the times come from: "costs", "plain" (a measured speed), "bound" (a lower bound), None (unknown)."""
        if self.known is not None:
            return "costs"
        if self.plain_tokens_per_s and self.round_s:
            return "plain"
        return "bound" if self.target_s and self.round_s else None

    @cached_property
    def cost(self) -> RoundCost:
        """The costs of rounds; only for a known source."""
        if self.known is not None:
            step = ModelSteps(Curve([(1, self.draft_s / self.k)])) if self.draft_s else ModelSteps()
            return self.known if self.known.levels else replace(self.known, levels=(step,))
        assert self.round_s is not None
        if self.source == "plain":
            assert self.plain_tokens_per_s is not None
            plain = self.batch / self.plain_tokens_per_s
        else:  # a plain round is no longer than the target's pass with drafted rows
            plain = self.round_s - (self.draft_s or 0.0)
        # The mean is over rounds with and without a draft.
        drafted = max(self.round_s, plain + (self.round_s - plain) / self.drafted)
        return RoundCost(Curve([(self.batch, plain), (self.batch * (1 + self.k), drafted)]))

    def ratio(self, k: int) -> float:
        """Time of a round with `k` draft tokens a sequence over a plain round's: the tokens that it needs to pay."""
        x = expected(self.cost, self.rates, k, self.batch)
        return x.seconds / x.plain

    def _over_plain(self, tokens: float, need: float) -> float:
        """Speed over plain decoding, where drafts bring so many tokens a round; other rounds bring one."""
        return (1.0 + self.drafted * (tokens - 1.0)) / (1.0 + self.drafted * (need - 1.0))

    @property
    def speedup(self) -> float:
        """The speed-up of the present rounds."""
        return self._over_plain(self.length, self.need)

    @property
    def need(self) -> float:
        """The tokens that a round with as many draft tokens as now needs to pay."""
        return self.ratio(self.now)

    @property
    def _lengths(self) -> range:
        return range(1, min(MOST, 2 * round(self.k) + 1) + 1)

    @cached_property
    def best(self) -> tuple[int, float]:
        """The length with the highest predicted speed-up at this batch, and that speed-up; (0, 1.0) where none pays."""
        k, _ = best(self.cost, self.rates, self._lengths, self.batch)
        return k, self._over_plain(expected(self.cost, self.rates, k, self.batch).tokens, self.ratio(k))

    @cached_property
    def table(self) -> tuple[tuple[int, int], ...]:
        """Best lengths as (first batch, length) rows; empty without costs, as only they tell about other batches."""
        if self.known is None:
            return ()
        rows = lengths_by_batch(self.cost, self.rates, self._lengths, LARGEST)
        return tuple((first, k) for first, _, k in rows)


def rounds_of(counted: Counted) -> Rounds | None:
    """The rounds by an engine's counters; None where nothing was drafted."""
    drafts = counted.drafts or 0.0
    if not drafts or not counted.draft_tokens:
        return None
    k, length = counted.draft_tokens / drafts, 1.0 + (counted.accepted or 0.0) / drafts
    places = sorted(((int(p), n) for p, n in counted.accepted_per_pos.items()))
    survival = tuple(n / drafts for _, n in places) if places else _geometric(length, round(k))
    survival += (0.0,) * (round(k) - len(survival))  # places at which no token was accepted
    total, passes = sum(counted.undrafted.values()) + drafts, counted.passes
    batch = total / passes if passes and counted.stages and counted.undrafted else counted.running or 1.0
    share = min(1.0, drafts / (total if counted.undrafted else counted.gaps or drafts))
    made = Rounds(counted, k, length, survival, max(1.0, batch), drafted=share)
    if passes and (whole := sum(counted.stages.values()) / passes):
        draft, target = (counted.stages.get(name, 0.0) / passes for name in ("draft", "target"))
        return replace(made, round_s=whole, draft_s=draft, target_s=target, overhead_s=whole - draft - target)
    if counted.gaps and counted.gap_seconds:
        return replace(made, round_s=counted.gap_seconds / counted.gaps)
    seconds = counted.decode_seconds or made.batch * (counted.seconds or 0.0)
    return replace(made, round_s=length * seconds / counted.tokens) if seconds and counted.tokens else made


def _geometric(length: float, k: int) -> tuple[float, ...]:
    """The survival of a constant rate that gives this mean length, for engines that report only a mean."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(k + 1)) < length else (low, rate)
    return tuple(low**i for i in range(1, k + 1))
