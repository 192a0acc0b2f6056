"""What speculation should bring, from the cost curve and acceptance alone: beside it stands what was measured.

A round decides the accepted tokens and one more; it takes a pass of the target over all its rows, the drafter's steps,
and what lies outside the models (Leviathan et al., 2023, section 3, with measured times for their cost factor c).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from sameseed.lengths._cost import Curve
from sameseed.models.runner import ModelRunner
from sameseed.request import SpecMetrics
from sameseed.spec.drafter import Drafter


@dataclass(frozen=True)
class Prediction:
    """What a run should have taken against plain decoding, by costs; `error`: predicted over measured, less 1.

    `draft_cost` says where the drafter's time comes from: the "curve" of its model, or the "run" itself where it has no
    model of which one could be measured; `draft_ms` is that of a round, `round_ms` the whole, `plain_ms` without it.
    """

    speedup: float
    error: float
    tokens_per_round: float
    rows_per_round: float
    plain_ms: float
    round_ms: float
    draft_ms: float
    draft_cost: str

    def as_dict(self) -> dict[str, object]:
        """Plain data for a record."""
        return asdict(self)


@dataclass(frozen=True)
class RunCounts:
    """What one run did. `seconds`: in all, `prefill`: of that before the first tokens, `outside`: outside the models.

    After those, `num_steps`: passes of the target, `num_rounds`: the same counted for every sequence in them.
    `context`: mean cached tokens of a sequence.
    """

    metrics: SpecMetrics
    num_steps: int
    num_rounds: int
    seconds: float
    prefill: float
    draft: float
    outside: float
    context: float


def predict(run: RunCounts, plain: RunCounts, target: Curve, draft: Curve | None, at_once: bool = False) -> Prediction:
    """The speed-up that costs and acceptance promise for a run, of which only its counts are used.

    `draft`: passes of the draft model; None: its time is taken from the run; `at_once`: it guesses a
    draft in one. Time outside the models: as in `plain`.
    """
    overhead = plain.outside / plain.num_steps

    def seconds(of: RunCounts) -> tuple[float, float]:
        together = of.num_rounds / of.num_steps
        rows = together + of.metrics.num_draft_tokens / of.num_steps
        each = [round(of.context)] * max(1, round(together))
        extra = target.extra(each, [rows / len(each)] * len(each))
        return rows, target.at(rows) + extra + overhead

    rows, checking = seconds(run)
    _, alone = seconds(plain)
    drafting, source = _drafting(run, draft, at_once)
    whole = plain.prefill + run.num_steps * (checking + drafting)
    before = plain.prefill + plain.num_steps * alone
    found, measured = before / whole, plain.seconds / run.seconds
    return Prediction(
        speedup=found,
        error=found / measured - 1.0,
        tokens_per_round=1.0 + run.metrics.num_accepted_tokens / max(1, run.num_rounds),
        rows_per_round=rows,
        plain_ms=alone * 1e3,
        round_ms=(checking + drafting) * 1e3,
        draft_ms=drafting * 1e3,
        draft_cost=source,
    )


def _drafting(run: RunCounts, draft: Curve | None, at_once: bool) -> tuple[float, str]:
    """Seconds of drafting in a mean round: passes of the draft model, the first over what was decided since.

    `at_once`: that is the only one, over a row more for each token but one.
    """
    if draft is None:
        return run.draft / run.num_steps, "run"
    m = run.metrics
    if not m.num_drafts:
        return 0.0, "curve"
    together = run.num_rounds / run.num_steps
    steps = m.num_draft_tokens / m.num_drafts
    read = 1.0 + m.num_accepted_tokens / m.num_drafts
    first = draft.at(together * (read + steps - 1.0 if at_once else min(2.0, read)))
    extra = draft.extra([round(run.context)] * max(1, round(together)), [1.0] * max(1, round(together)))
    drafted = min(1.0, m.num_drafts / run.num_rounds * max(1.0, together))  # rounds in which anyone is drafted for
    if at_once:
        return drafted * (first + extra), "curve"
    return drafted * (first + (steps - 1.0) * draft.at(together) + steps * extra), "curve"


def draft_curve(drafter: Drafter, measure: Callable[[ModelRunner], Curve]) -> Curve | None:
    """Costs of the one model that writes a drafter's chains; None where there is none, or others write beside it."""
    runner = getattr(drafter, "runner", None)
    alone = not getattr(drafter, "below", ())
    return measure(runner) if isinstance(runner, ModelRunner) and alone else None
