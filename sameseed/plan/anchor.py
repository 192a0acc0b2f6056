"""Anchored times: a few real rounds of the loaded model, plain and with each draft in turn, and first-token times."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median, stdev
from typing import Any

import numpy as np

from sameseed.config import parse_draft
from sameseed.cost.curve import SHORT
from sameseed.cost.running import EngineCost
from sameseed.engine.calibrate import LONG, measure_engine
from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
from sameseed.plan.cost import RoundCost
from sameseed.plan.outlook import DraftPlan
from sameseed.plan.simulate import Z90
from sameseed.plan.times import Times
from sameseed.request import SamplingParams
from sameseed.study.shapes import SHAPES

TURNS = 3
PASSES = 40  # passes over a short draft in a turn, which takes LEAST seconds at least
LEAST = 0.5
FEW, MANY = 1.0, 8.0  # rows of the passes whose times give the spread


class AnchoredTimes:
    """Seconds of the target's passes: medians over turns. The spread is that between turns."""

    grade = "anchored"

    def __init__(self, turns: Seq[RoundCost], first_s: Seq[float] = (), prompt_tokens: int = 1) -> None:
        """`first_s`: seconds to the first token of prompts of `prompt_tokens` tokens."""
        self.turns, self.first_s, self.prompt_tokens = turns, first_s, prompt_tokens
        self.prompt_spread = _scatter(first_s), 0.0
        few, many = ([self._target(t, rows, 1, 0) for t in turns] for rows in (FEW, MANY))
        self.spread = _scatter(few), _scatter([b / a for a, b in zip(few, many, strict=True)])

    @staticmethod
    def _target(cost: RoundCost, rows: float, batch: int, context: int) -> float:
        return float(cost.target(np.array([float(rows)]), np.array([float(batch)]), np.array([float(context)]))[0])

    def seconds(self, batch: int, new_tokens: int, context: int) -> float:
        return median(self._target(t, batch * new_tokens, batch, context) for t in self.turns)

    def prompt(self, tokens: int) -> float:
        return median(self.first_s) * tokens / self.prompt_tokens


class AnchoredSteps:
    """Seconds of a drafter's steps: medians over turns. The spread is that between turns."""

    grade = "anchored"

    def __init__(self, turns: Seq[RoundCost]) -> None:
        self.turns = turns
        self.spread = _scatter([self._step(t, 1, 0) for t in turns]), 0.0

    @staticmethod
    def _step(cost: RoundCost, batch: int, context: int) -> float:
        steps, b, c = np.array([[0.0], [1.0]]), np.array([float(batch)]), np.array([float(context)])
        before, after = cost.draft(0, steps, b, c)[:, 0]
        return float(after - before)

    def seconds(self, batch: int, new_tokens: int, context: int) -> float:
        return median(self._step(t, batch, context) for t in self.turns)

    def prompt(self, tokens: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Anchor:
    """Results of real rounds: times of the target's passes, drafts with their times, and seconds between passes."""

    times: AnchoredTimes
    drafts: tuple[DraftPlan, ...]
    gap: float


def anchor(
    model: str,
    drafts: Seq[DraftPlan],
    draft_format: str,
    prompt_tokens: int,
    expected: Times,
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
    seconds = max(LEAST, PASSES * expected.seconds(1, 4, SHORT) + 2 * expected.prompt(SHORT))
    for _ in range(TURNS):
        for llm, costs in zip(llms, turns, strict=True):
            costs.append(measure_engine(llm.engine, seconds))
        prompt = [
            rng.randrange(plain.engine.runner.model.config.vocab_size) for _ in range(min(prompt_tokens, length - 1))
        ]
        first.append(plain.generate([prompt], SamplingParams(max_tokens=1))[0].metrics.time_to_first_token)
    made = []
    for plan, costs in zip(drafts, turns[1:], strict=True):
        seen = [RoundCost.of(c) for c in costs if c.draft.seen]
        start = max(0.0, median(t.levels[0].start + t.drafted_gap - t.plain_gap for t in seen)) if seen else 0.0
        made.append(replace(plan, times=AnchoredSteps(seen), start_s=start, at_once=False) if seen else plan)
    times = AnchoredTimes([RoundCost.of(c) for costs in turns for c in costs], first, prompt_tokens)
    return Anchor(times, tuple(made), median(t.plain_gap + t.gap_per_seq for t in map(RoundCost.of, turns[0])))


def _scatter(values: Seq[float]) -> float:
    """Standard deviation of logarithms, widened for few values (Student's t); 0 for fewer than two positive values."""
    known = [math.log(v) for v in values if v > 0]
    return stdev(known) * (1.0 + (Z90**2 + 1.0) / (4.0 * (len(known) - 1))) if len(known) > 1 else 0.0
