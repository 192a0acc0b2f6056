"""Anchored times: a few real rounds of the loaded model, plain and with each draft in turn, and first-token times."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median, stdev
from typing import Any

from sameseed.config import parse_draft
from sameseed.cost.curve import SHORT, Curve
from sameseed.cost.round import CostSpread, Gap, ModelSteps, RoundCost
from sameseed.cost.running import EngineCost
from sameseed.engine.calibrate import LONG, measure_engine
from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
from sameseed.measure.shapes import SHAPES
from sameseed.plan.outlook import Z90, DraftPlan
from sameseed.request import SamplingParams

TURNS = 3
PASSES = 40  # passes over a short draft in a turn, which takes LEAST seconds at least
LEAST = 0.5
FEW, MANY = 1.0, 8.0  # rows of the passes whose times give the spread


def middle(turns: Seq[EngineCost], first_s: Seq[float] = (), prompt_tokens: int = 1) -> RoundCost:
    """The median costs of several turns, whose scatter is the spread.

    `first_s`: seconds to the first token of prompts of `prompt_tokens` tokens.
    """
    curves = [t.target for t in turns]
    rows = max((c.rows for c in curves), key=len)
    slopes = median(c.per_token for c in curves), median(c.per_row for c in curves)
    curve = Curve([(round(m), median(c.at(m) for c in curves)) for m in rows], curves[0].context, *slopes)
    few, many = ([c.at(m) for c in curves] for m in (FEW, MANY))
    steps = [t.draft.terms(1)[1] for t in turns]
    spread = CostSpread(_scatter(few), _scatter([b / a for a, b in zip(few, many, strict=True)]), _scatter(steps))
    gaps = [Gap(t.gap.at(1, False), t.gap.at(1, True)) for t in turns]
    gap = Gap(median(g.plain for g in gaps), median(g.drafted for g in gaps))
    by_size = [(size, median(t.draft.terms(size)[1] for t in turns)) for size in (1, 64)]
    own = ModelSteps(Curve(by_size), start=median(t.draft.terms(1)[0] for t in turns))
    first = median(first_s) / prompt_tokens if first_s else None
    return RoundCost(curve, (own,), gap, None if first is None else lambda n: first * n, "anchored", spread)


@dataclass(frozen=True)
class Anchor:
    """Results of real rounds: costs of the target, and drafts with theirs."""

    cost: RoundCost
    drafts: tuple[DraftPlan, ...]


def anchor(
    model: str,
    drafts: Seq[DraftPlan],
    draft_format: str,
    prompt_tokens: int,
    expected: RoundCost,
    max_model_len: int,
    **settings: Any,
) -> Anchor:
    """Load the model and measure it; `settings` are those of LLM. A draft without a measured round keeps its plan.

    Raises ConfigError for a shape, which has no weights, and what LLM raises.
    """
    if model.lower() in SHAPES:
        raise ConfigError(f"--run needs weights, and {model} is a shape: profile it (sameseed profile --shape {model})")
    length = min(max_model_len, max(LONG, prompt_tokens) + SHORT)
    given = {**settings, "max_model_len": length, "max_num_seqs": 4, "prefix_cache": False}
    plain = LLM(model, None, **given)
    specs = [replace(parse_draft(plan.text), format=draft_format) for plan in drafts]
    llms = [plain, *(LLM(model, spec, **given, target=plain.engine.runner) for spec in specs)]
    turns: list[list[EngineCost]] = [[] for _ in llms]
    first = []
    rng = random.Random(0)
    seconds = max(LEAST, PASSES * expected.target(4, 1, SHORT) + 2 * expected.prompt(SHORT))
    for _ in range(TURNS):
        for llm, costs in zip(llms, turns, strict=True):
            costs.append(measure_engine(llm.engine, seconds))
        prompt = [
            rng.randrange(plain.engine.runner.model.config.vocab_size) for _ in range(min(prompt_tokens, length - 1))
        ]
        first.append(plain.generate([prompt], SamplingParams(max_tokens=1))[0].metrics.time_to_first_token)
    cost, made = middle([c for costs in turns for c in costs], first, prompt_tokens), []
    gap = middle(turns[0]).gap(1, False)
    for plan, costs in zip(drafts, turns[1:], strict=True):
        seen = [c for c in costs if c.draft.seen]
        if seen:
            own = middle(seen)
            (steps,), more = own.levels, own.gap(1, True) - own.gap(1, False)
            assert isinstance(steps, ModelSteps)
            plan = replace(plan, steps=replace(steps, start=max(0.0, steps.start + more)), grade="anchored")
            plan = replace(plan, spread=CostSpread(own.spread.draft))
        made.append(plan)
    return Anchor(replace(cost, between=Gap(gap, gap)), tuple(made))


def _scatter(values: Seq[float]) -> float:
    """Standard deviation of logarithms, widened for few values (Student's t); 0 for fewer than two positive values."""
    known = [math.log(v) for v in values if v > 0]
    return stdev(known) * (1.0 + (Z90**2 + 1.0) / (4.0 * (len(known) - 1))) if len(known) > 1 else 0.0
