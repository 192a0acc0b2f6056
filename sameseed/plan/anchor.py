"""Anchored times: a few real rounds of the loaded model, plain and with each draft in turn, and first-token times."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import median, stdev
from typing import Any

from sameseed.config import parse_draft
from sameseed.cost.curve import SHORT
from sameseed.cost.round import Gap, RoundCost
from sameseed.cost.running import EngineCost
from sameseed.engine.calibrate import LONG, measure_engine
from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
from sameseed.measure.shapes import SHAPES
from sameseed.plan.outlook import Z90, DraftPlan
from sameseed.request import SamplingParams

TURNS = 3  # the fewest that have a middle and a spread
PASSES = 40  # passes over a short draft in a turn, which takes LEAST seconds at least
LEAST = 0.5


def middle(turns: Seq[EngineCost], first_s: Seq[float] = (), prompt_tokens: int = 1) -> RoundCost:
    """The costs of the turn with the median time of a pass; how these times scatter is the spread.

    `first_s`: seconds to the first token of prompts of `prompt_tokens` tokens.
    """
    ordered = sorted(turns, key=lambda turn: turn.target.at(1))
    logs = [math.log(turn.target.at(1)) for turn in turns]
    # Few turns scatter less than many would: Student's t.
    spread = stdev(logs) * (1.0 + (Z90**2 + 1.0) / (4.0 * (len(logs) - 1))) if len(logs) > 1 else 0.0
    each = median(first_s) / prompt_tokens if first_s else 0.0
    prompts = (lambda tokens: each * tokens) if first_s else None
    return replace(ordered[len(ordered) // 2].whole, prompts=prompts, grade="anchored", spread=spread)


def anchor(
    model: str,
    drafts: Seq[DraftPlan],
    draft_format: str,
    prompt_tokens: int,
    expected: RoundCost,
    max_model_len: int,
    **settings: Any,
) -> tuple[RoundCost, list[DraftPlan]]:
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
    rng, vocab_size, first = random.Random(0), plain.engine.runner.model.config.vocab_size, []
    seconds = max(LEAST, PASSES * expected.target(4, 1, SHORT) + 2 * expected.prompt(SHORT))
    tokens = min(prompt_tokens, length - 1)
    for _ in range(TURNS):
        for llm, costs in zip(llms, turns, strict=True):
            costs.append(measure_engine(llm.engine, seconds))
        prompt = [rng.randrange(vocab_size) for _ in range(tokens)]
        first.append(plain.generate([prompt], SamplingParams(max_tokens=1))[0].metrics.time_to_first_token)
    made, gap = [], middle(turns[0]).between.at(1, False)
    for plan, costs in zip(drafts, turns[1:], strict=True):
        if seen := [c for c in costs if c.draft.seen]:
            own = middle(seen)
            (steps,), more = own.levels, own.between.at(1, True) - own.between.at(1, False)
            assert isinstance(steps, EngineCost)
            steps.draft.coefficients[0] = max(0.0, steps.draft.coefficients[0] + more)  # its own time between passes
            plan = replace(plan, steps=steps, grade="anchored", spread=own.spread)
        made.append(plan)
    whole = middle([c for costs in turns for c in costs], first, tokens)
    return replace(whole, between=Gap(gap, gap)), made
