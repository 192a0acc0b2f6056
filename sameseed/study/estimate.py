"""Prediction of the speed-up from the cost curve and acceptance alone, for comparison with the measured speed-up.

A round yields its accepted tokens and one more. It costs one target pass over all its rows, the drafter's steps, and
the time outside the models (Leviathan et al., 2023, section 3, with measured times for their cost factor c).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from sameseed.cost.running import Curve
from sameseed.models.runner import ModelRunner
from sameseed.request import SpecMetrics
from sameseed.spec.drafter import Drafter


@dataclass(frozen=True)
class Prediction:
    """The predicted speed-up of a run over plain decoding; `error`: predicted over measured speed-up, minus 1.

    `plain_ms`: one step of plain decoding. `round_ms`: one round, of which `draft_ms` is drafting. `draft_cost`: the
    source of the drafting time, "curve" (cost curve of the draft model) or "run" (measured in the run itself, because
    the drafter has no single model with a cost curve).
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
    """Counts and times of one run, in seconds: `seconds` in total, `prefill`, `draft`, and `outside` the models.

    `num_steps`: target passes after the prefill. `num_rounds`: the same passes counted once per sequence in them.
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
    """Predict the speed-up of a run from cost curves and the run's counts.

    `target`, `draft`: cost curves of both models; without `draft`, drafting time is taken from the run. `at_once`: the
    draft model makes a whole draft in one pass. Time outside the models is assumed to be that of `plain`.
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
    """Mean seconds of drafting per step, and their source ("curve" or "run").

    By the curve: the draft model's first pass reads the tokens decided since the last draft, and each later pass one
    row per sequence. `at_once`: the first pass is the only one, with one more row for each draft token but the first.
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
    drafted = min(1.0, m.num_drafts / run.num_rounds * max(1.0, together))  # share of steps with any draft
    if at_once:
        return drafted * (first + extra), "curve"
    return drafted * (first + (steps - 1.0) * draft.at(together) + steps * extra), "curve"


def draft_curve(drafter: Drafter, measure: Callable[[ModelRunner], Curve]) -> Curve | None:
    """Cost curve of the drafter's model; None if it has no model of its own, or has drafters below it."""
    runner = getattr(drafter, "runner", None)
    alone = not getattr(drafter, "below", ())
    return measure(runner) if isinstance(runner, ModelRunner) and alone else None
