"""Doctor: explains from an engine's counters why speculation does not pay, and says what to set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sameseed.cost.curve import Curve
from sameseed.cost.round import Gap, ModelSteps, RoundCost
from sameseed.measure.costs import Profile
from sameseed.plan import faults
from sameseed.plan.faults import Fault
from sameseed.plan.metrics import Counted
from sameseed.plan.pricing import Pricing, state_of


def read_costs(path: Path) -> RoundCost:
    """Costs of rounds from `sameseed profile --json`: those of the first format. Raises ConfigError."""
    profile = Profile.read(path)
    cost, draft = profile.cost(profile.formats[0]), profile.draft
    return cost if draft is None else replace(cost, levels=(ModelSteps(draft.curve(draft.formats[0])),))


@dataclass(frozen=True)
class Diagnosis:
    """The result, with the main fault first.

    `have`: tokens that a round decides; `need`: those that it needs to pay; `need_is`: where `need` comes from.
    """

    engine: str
    verdict: str
    faults: tuple[Fault, ...]
    k: float | None = None
    have: float | None = None
    need: float | None = None
    need_is: str | None = None
    best_k: int | None = None
    speedup: float | None = None
    best_speedup: float | None = None
    by_batch: tuple[tuple[int, int], ...] = ()
    survival: tuple[float, ...] = ()
    acceptance: float | None = None
    batch: float | None = None
    prompt_tokens: float | None = None  # mean of a request
    round_ms: float | None = None
    draft_share: float | None = None
    tokens: float | None = None


def diagnose(counted: Counted, cost: RoundCost | None = None, plain_tokens_per_s: float | None = None) -> Diagnosis:
    """Explain an engine's speculation from its counters."""
    state = state_of(counted)
    if state is None:
        fault = faults.undrafted(counted)
        return Diagnosis(counted.engine, fault.sentence, (fault,), tokens=counted.tokens)
    if cost is None and counted.pass_costs:
        gap = state.overhead_s or 0.0
        passes = sorted((int(rows), seconds) for rows, seconds in counted.pass_costs.items())
        cost = RoundCost(Curve(passes), gap=Gap(gap, gap))
    pricing = Pricing(state, cost, plain_tokens_per_s)
    found = tuple(faults.find(state, pricing))
    known: dict[str, Any] = {}
    if pricing.source is not None:
        need, (best, speed) = pricing.need, pricing.best
        known = {"need": need, "need_is": pricing.source, "speedup": pricing.speedup, "by_batch": pricing.table}
        known |= {} if pricing.source == "bound" else {"best_k": best, "best_speedup": speed}
    return Diagnosis(
        counted.engine,
        faults.verdict(state, pricing, found),
        found,
        state.k,
        state.length,
        survival=state.survival if counted.accepted_per_pos else (),  # else it is computed from the mean
        acceptance=state.acceptance,
        batch=state.batch if counted.running or counted.undrafted else None,  # else it is taken as 1
        prompt_tokens=(counted.prompt_tokens or 0.0) / counted.requests if counted.requests else None,
        round_ms=None if state.round_s is None else state.round_s * 1e3,
        draft_share=state.draft_share,
        tokens=counted.tokens,
        **known,
    )
