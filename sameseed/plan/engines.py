"""Costs of another engine's passes, read from a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sameseed import fields
from sameseed.cost.curve import Curve
from sameseed.cost.round import Gap, RoundCost
from sameseed.cost.tables import ENGINE_SCHEMA, P10_TO_P90, read_table
from sameseed.errors import ConfigError

UNSTATED = 0.1  # spread of an engine's times that have no p10 and p90


@dataclass(frozen=True)
class EnginePass:
    """Milliseconds of one pass over `rows` rows in all, of `batch` sequences."""

    batch: int
    rows: int
    ms: float
    p10: float | None = None
    p90: float | None = None


@dataclass(frozen=True)
class EngineStep:
    """Milliseconds of one step of a drafter for `batch` sequences."""

    batch: int
    ms: float


@dataclass(frozen=True)
class EnginePrompt:
    """Milliseconds until the first token of a prompt."""

    tokens: int
    ms: float


@dataclass(frozen=True)
class EngineCosts:
    """Costs of another engine's passes: a JSON file with these fields and `"schema": "sameseed.engine-costs/1"`.

    `gap_ms`: milliseconds between passes, where `passes` do not include them. `draft_ms`: of each draft token, by batch
    size. Where whole rounds were measured, `draft` names the draft whose time `passes` include; `survival`: the share
    of `rounds` rounds in which each place of that draft was right.
    """

    engine: str
    passes: tuple[EnginePass, ...]
    draft_ms: tuple[EngineStep, ...] = ()
    prompts: tuple[EnginePrompt, ...] = ()
    gap_ms: float = 0.0
    machine: str = ""
    format: str = ""
    context: int = 0
    draft: str = ""
    survival: tuple[float, ...] = ()
    rounds: int = 0

    def __post_init__(self) -> None:
        times = [p.ms for p in self.passes] + [p.ms for p in self.draft_ms] + [p.ms for p in self.prompts]
        rows = all(1 <= p.batch <= p.rows for p in self.passes)
        if not self.passes or not rows or not all(0 < ms < math.inf for ms in times):
            raise ConfigError("costs of an engine: passes with batch >= 1, rows >= batch and ms > 0, one at least")

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of sequences that were measured, in ascending order."""
        return tuple(sorted({p.batch for p in self.passes}))

    def cost(self) -> RoundCost:
        """The costs of rounds, without those of a draft."""
        own = [abs(math.log(p.p90 / p.p10)) / P10_TO_P90 for p in self.passes if p.p10 and p.p90]
        level = median(own) if own else UNSTATED
        prompts = Curve(sorted((p.tokens, p.ms / 1e3) for p in self.prompts)).at if self.prompts else None
        gap = Gap(self.gap_ms / 1e3, self.gap_ms / 1e3)
        return RoundCost(EnginePasses(self), (), gap, prompts, "profiled", level)


class EnginePasses:
    """Passes of another engine: linear in rows at each measured batch size, and between batch sizes."""

    def __init__(self, costs: EngineCosts) -> None:
        self.curves = {
            b: Curve(sorted((p.rows, p.ms / 1e3) for p in costs.passes if p.batch == b)) for b in costs.batches
        }

    def cost(self, rows: float, batch: float = 1.0, context: float = 0.0) -> float:
        if len(self.curves) == 1:
            return next(iter(self.curves.values())).at(rows)
        return Curve([(b, curve.at(b * rows / batch)) for b, curve in self.curves.items()]).at(batch)


def read_costs(path: Path, engine: str) -> EngineCosts:
    """Costs of another engine from a file. Raises ConfigError."""
    data = read_table(path)
    if data.get("schema") != ENGINE_SCHEMA:
        raise ConfigError(
            f"{path} has schema {data.get('schema')!r}; costs of {engine} have {ENGINE_SCHEMA!r}: see "
            "docs/guides/plan.md"
        )
    costs = fields.parse(EngineCosts, {k: v for k, v in data.items() if k != "schema"}, str(path))
    if costs.engine != engine:
        raise ConfigError(f"{path} holds the costs of {costs.engine}, not of {engine}: give --engine {costs.engine}")
    return costs
