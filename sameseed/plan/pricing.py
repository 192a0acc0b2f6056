"""The mean round of an engine, and what rounds of other draft lengths would cost and bring.

A round pays where its tokens exceed the ratio of its time to that of plain decoding (Leviathan et al., 2023, section
3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sameseed.cost.curve import interpolate
from sameseed.plan.metrics import Counted
from sameseed.tuned import PassCosts

MOST = 16  # most draft tokens considered (and at most twice those that were drafted, plus 1)
LARGEST = 64  # most sequences considered
PAYS = 1.02  # speed-up over plain decoding from which a length is advised
MARGIN = 0.98  # share of break-even above which a round is held to pay


@dataclass(frozen=True)
class State:
    """The mean round. `k`: draft tokens; `survival[i]`: share of drafts whose token at place i was accepted.

    `length`: tokens that a round with a draft decides, the bonus token included. Seconds are of a mean round: `round_s`
    from one round to the next; `draft_s` and `target_s` are its parts in the models, where the engine says so.
    """

    counted: Counted
    k: float
    length: float
    survival: tuple[float, ...]
    batch: float
    round_s: float | None = None
    draft_s: float | None = None
    target_s: float | None = None
    overhead_s: float | None = None

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

    def tokens(self, k: int) -> float:
        """Expected tokens of a round with `k` draft tokens; places beyond those measured get the mean rate at most."""
        rates = self.conditional
        beyond = min(rates[-1], self.survival[-1] ** (1 / len(rates)))  # the last rate may come from a few easy texts
        total, alive = 1.0, 1.0
        for i in range(k):
            alive *= rates[i] if i < len(rates) else beyond
            total += alive
        return total


def state_of(counted: Counted) -> State | None:
    """The mean round by an engine's counters; None where nothing was drafted."""
    length, k, drafts = counted.accept_length, max(0.0, (counted.width or 1.0) - 1.0), counted.drafts or 0.0
    if drafts and counted.draft_tokens:
        k = counted.draft_tokens / drafts
        length = 1.0 + (counted.accepted or 0.0) / drafts
    if not k or length is None:
        return None
    places = sorted(((int(p), n) for p, n in counted.accepted_per_pos.items()))
    survival = tuple(n / drafts for _, n in places) if places and drafts else _geometric(length, round(k))
    survival += (0.0,) * (round(k) - len(survival))  # places at which no token was accepted
    total = sum(counted.undrafted.values()) + drafts
    passes = counted.passes
    batch = total / passes if passes and counted.stages and counted.undrafted else counted.running or 1.0
    made = State(counted, k, length, survival, max(1.0, batch))
    whole = sum(counted.stages.values())
    if passes and whole:
        parts = {name: seconds / passes for name, seconds in counted.stages.items()}
        draft, target = parts.get("draft", 0.0), parts.get("target", 0.0)
        rest = whole / passes - draft - target
        return replace(made, round_s=whole / passes, draft_s=draft, target_s=target, overhead_s=rest)
    if counted.gaps and counted.gap_seconds and counted.engine != "sglang":  # SGLang's is of a token, not of a round
        return replace(made, round_s=counted.gap_seconds / counted.gaps)
    if counted.decode_seconds and counted.tokens:
        return replace(made, round_s=length * counted.decode_seconds / counted.tokens)
    if counted.seconds and counted.tokens:
        return replace(made, round_s=length * made.batch * counted.seconds / counted.tokens)
    return made


def _geometric(length: float, k: int) -> tuple[float, ...]:
    """The survival of a constant rate that gives this mean length, for engines that report only a mean."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(k + 1)) < length else (low, rate)
    return tuple(low**i for i in range(1, k + 1))


@dataclass(frozen=True)
class Pricing:
    """Times of a round over a plain one's. `source`: "costs", "plain" (a measured speed) or "bound" (a lower bound)."""

    state: State
    costs: PassCosts | None = None
    plain_tokens_per_s: float | None = None

    @property
    def source(self) -> str | None:
        """Where the times come from; None where nothing is known."""
        if self.costs is not None and self.costs.rows:
            return "costs"
        if self.plain_tokens_per_s and self.state.round_s:
            return "plain"
        return "bound" if self.state.target_s and self.state.round_s else None

    def ratio(self, k: int, batch: float) -> float:
        """Time of a round with `k` draft tokens a sequence over a plain round's: the tokens that it needs to pay."""
        s = self.state
        if k == 0:
            return 1.0
        if self.source == "costs":
            return self._seconds(k, batch) / self._seconds(0, batch)
        assert s.round_s is not None
        if self.source == "plain":
            assert self.plain_tokens_per_s is not None
            plain = s.batch / self.plain_tokens_per_s
        else:  # a plain round is no longer than the target's pass with drafted rows
            plain = s.round_s - (s.draft_s or 0.0)
        return 1.0 + max(0.0, s.round_s / plain - 1.0) * k / s.k

    def _seconds(self, k: int, batch: float) -> float:
        costs = self.costs
        assert costs is not None
        seconds = self.target_seconds(batch * (1 + k)) + costs.gap_ms / 1e3
        if k and costs.draft_ms:
            seconds += (costs.draft_start_ms + k * interpolate(costs.rows, costs.draft_ms, batch)) / 1e3
        elif k and self.state.draft_s:
            seconds += self.state.draft_s * k / self.state.k
        return seconds

    def target_seconds(self, rows: float) -> float:
        """Seconds of a pass of the target, by the cost table."""
        assert self.costs is not None
        return interpolate(self.costs.rows, self.costs.ms, rows) / 1e3

    def best(self, batch: float) -> tuple[int, float]:
        """The length with the highest predicted speed-up at this batch, and that speed-up; (0, 1.0) where none pays."""
        found = [
            (self.state.tokens(k) / self.ratio(k, batch), k)
            for k in range(1, min(MOST, 2 * round(self.state.k) + 1) + 1)
        ]
        speed, k = max(found, key=lambda pair: (pair[0], -pair[1]))
        return (k, speed) if speed >= PAYS else (0, 1.0)

    def table(self) -> tuple[tuple[int, int], ...]:
        """Best lengths as (first batch, length) rows; empty without costs, as only they tell about other batches."""
        if self.source != "costs":
            return ()
        rows: list[tuple[int, int]] = []
        for batch in range(1, LARGEST + 1):
            k = self.best(batch)[0]
            if not rows or rows[-1][1] != k:
                rows.append((batch, k))
        return tuple(rows)
