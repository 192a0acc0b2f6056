"""Prediction of a run's speed-up from costs and acceptance alone, for comparison with the measured speed-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sameseed.cost.curve import Curve
from sameseed.cost.round import Drafted, Gap, ModelSteps, Passes, RoundCost, expected
from sameseed.models.runner import ModelRunner
from sameseed.spec.drafter import Drafter


@dataclass(frozen=True)
class Prediction:
    """The predicted speed-up of a run over plain decoding; `error`: predicted over measured speed-up, minus 1.

    `decode_speedup` and `decode_error`: the same after the first tokens. `plain_ms`: one step of plain decoding.
    `round_ms`: one round, of which `draft_ms` is drafting. `draft_cost`: the source of the drafting time, "curve" (cost
    curve of the draft model) or "run" (measured in the run itself, because the drafter has no single model with a cost
    curve).
    """

    speedup: float
    error: float
    decode_speedup: float
    decode_error: float
    tokens_per_round: float
    rows_per_round: float
    plain_ms: float
    round_ms: float
    draft_ms: float
    draft_cost: str


@dataclass(frozen=True)
class RunCounts:
    """Counts and times of one run, in seconds: `seconds` in total, `prefill`, `draft`, and `outside` the models.

    `num_steps`: target passes after the prefill. `rounds`: the same passes counted once per sequence in them, by draft
    tokens from 0 on; `accepted`: draft tokens that were accepted in all of them. `context`: mean cached tokens of a
    sequence. `prompts`: tokens of each prompt.
    """

    rounds: tuple[int, ...]
    accepted: int
    num_steps: int
    seconds: float
    prefill: float
    draft: float
    outside: float
    context: float
    prompts: tuple[int, ...] = ()

    @property
    def batch(self) -> float:
        """Mean sequences of a pass."""
        return max(1, sum(self.rounds)) / self.num_steps

    def drafted(self, k: int) -> Drafted:
        """The mean round, whatever `k`: drafts of the run's own lengths."""
        rounds = self.rounds if any(self.rounds) else (1,)  # none where each output is a single token
        n, drafts = sum(rounds), sum(rounds[1:])
        steps = sum(k * count for k, count in enumerate(rounds)) / max(1, drafts)
        return Drafted(self.accepted / n, tuple(count / n for count in rounds), ((drafts / n, steps),))


def predict(run: RunCounts, plain: RunCounts, target: Passes, draft: Curve | None, at_once: bool = False) -> Prediction:
    """Predict the speed-up of a run from cost curves and the run's counts.

    `target`, `draft`: cost curves of both models; without `draft`, drafting time is taken from the run. `at_once`: the
    draft model makes a whole draft in one pass. Prompts take the time that they took in `plain`, and that of the draft
    model's passes over them. Time outside the models is that of each run.
    """
    own = ModelSteps(draft, at_once)
    gap = Gap(plain.outside / plain.num_steps, run.outside / run.num_steps)
    cost = RoundCost(target, (own,), gap)
    found = expected(cost, run, 1, run.batch, run.context)
    if draft is None:
        found = replace(found, draft=run.draft / run.num_steps)
    before = expected(cost, run, 0, plain.batch, run.context)
    decoding, plain_decoding = run.num_steps * found.seconds, plain.num_steps * before.plain
    prompts = plain.prefill + sum(map(own.prompt, run.prompts))
    whole = (plain.prefill + plain_decoding) / (prompts + decoding)
    decode = plain_decoding / (prompts - plain.prefill + decoding)
    measured_decode = (plain.seconds - plain.prefill) / (run.seconds - run.prefill)
    return Prediction(
        speedup=whole,
        error=whole * run.seconds / plain.seconds - 1.0,
        decode_speedup=decode,
        decode_error=decode / measured_decode - 1.0,
        tokens_per_round=found.tokens,
        rows_per_round=run.batch * (1.0 + run.drafted(1).rows),
        plain_ms=before.plain * 1e3,
        round_ms=found.seconds * 1e3,
        draft_ms=found.draft * 1e3,
        draft_cost="run" if draft is None else "curve",
    )


def draft_curve(drafter: Drafter, measure: Callable[[ModelRunner], Curve]) -> Curve | None:
    """Cost curve of the drafter's model; None if it has no model of its own, or has drafters below it."""
    runner = getattr(drafter, "runner", None)
    alone = not getattr(drafter, "below", ())
    return measure(runner) if isinstance(runner, ModelRunner) and alone else None
