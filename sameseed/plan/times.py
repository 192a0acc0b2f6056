"""Times of passes by batch size and new tokens: on paper, from a profile, or from another engine's cost table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sameseed import fields
from sameseed.cost.curve import Curve
from sameseed.errors import ConfigError
from sameseed.plan.cost import RoundCost
from sameseed.plan.paper import LEVEL_SPREAD, SHAPE_SPREAD, STUDENT, Sheet
from sameseed.study.costs import Profile
from sameseed.study.limits import Limits
from sameseed.study.shapes import shape_as_dict

ENGINE_SCHEMA = "sameseed.engine-costs/1"
MOST_ROWS = 512  # of one pass over a prompt, as in EngineConfig
UNSTATED = 0.1  # spread of an engine's times that have no p10 and p90


class Times(Protocol):
    """Seconds of passes."""

    @property
    def grade(self) -> str:
        """Source of the times: "paper", "profiled" or "anchored"."""

    @property
    def spread(self) -> tuple[float, float]:
        """Standard deviations of logarithms: of all passes together, and in addition of those over many rows."""

    def seconds(self, batch: int, new_tokens: int, context: int) -> float:
        """A pass over `new_tokens` of each of `batch` sequences, after `context` cached tokens."""

    def prompt(self, tokens: int) -> float:
        """The passes over a prompt."""


@dataclass(frozen=True)
class PaperTimes:
    """Times from bytes and operations, at the shares of the machine's limits that real passes reach."""

    sheet: Sheet
    limits: Limits
    grade: str = "paper"
    spread: tuple[float, float] = (LEVEL_SPREAD * STUDENT, SHAPE_SPREAD * STUDENT)

    def seconds(self, batch: int, new_tokens: int, context: int) -> float:
        return self.sheet.seconds(self.limits, batch, new_tokens, context)

    def prompt(self, tokens: int) -> float:
        starts = range(0, tokens, MOST_ROWS)
        passes = [(min(MOST_ROWS, tokens - at), at) for at in starts]
        return sum(self.sheet.seconds(self.limits, 1, n, at, prompt=True) for n, at in passes)


class ProfiledTimes:
    """Times from what `sameseed profile` measured of this shape, here or on another machine."""

    grade = "profiled"

    def __init__(self, profile: Profile, sheet: Sheet, format: str) -> None:
        """Raises ConfigError where that shape, format or cache was not profiled."""
        known, own = profile.shape, shape_as_dict("", sheet.config)
        other = [n for n in own if n not in ("name", "max_model_len", "architecture") and known.get(n) != own[n]]
        if other:
            raise ConfigError(
                f"the costs are of {known.get('name')}, whose {other[0]} is {known.get(other[0])} and not "
                f"{own[other[0]]}: profile this model (sameseed profile --model ... --json FILE)"
            )
        self.cost = RoundCost.from_profile(profile, format)
        kv_format = next(x.kv_format for x in profile.costs if x.format == format)
        if kv_format != sheet.kv_format:
            raise ConfigError(
                f"{format} was profiled with a cache in {kv_format}, not {sheet.kv_format}: give --kv-format"
            )
        self.spread = (self.cost.spread.target, self.cost.spread.target)

    def seconds(self, batch: int, new_tokens: int, context: int) -> float:
        b, rows = np.array([float(batch)]), np.array([float(batch * new_tokens)])
        return float(self.cost.target(rows, b, np.array([float(context)]))[0])

    def prompt(self, tokens: int) -> float:
        return float(self.cost.prefill(np.array([float(tokens)]), False)[0])


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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> EngineCosts:
        """The costs from plain data, as JSON gives it. Raises ConfigError that names the key."""
        return fields.parse(cls, {k: v for k, v in data.items() if k != "schema"}, where)


class EngineTimes:
    """Times from another engine's cost table: linear in rows at each measured batch size, and between batch sizes."""

    grade = "profiled"

    def __init__(self, costs: EngineCosts) -> None:
        self.costs = costs
        self.curves = {
            b: Curve(sorted((p.rows, p.ms / 1e3) for p in costs.passes if p.batch == b)) for b in costs.batches
        }
        known = [abs(np.log(p.p90 / p.p10)) / 2.563 for p in costs.passes if p.p10 and p.p90]
        own = float(np.median(known)) if known else UNSTATED
        self.spread = (own, own)

    def seconds(self, batch: int, new_tokens: int, context: int) -> float:
        if len(self.curves) == 1:
            return next(iter(self.curves.values())).at(batch * new_tokens)
        return Curve([(b, curve.at(b * new_tokens)) for b, curve in self.curves.items()]).at(batch)

    def prompt(self, tokens: int) -> float:
        """Raises ConfigError where the table has no prompts."""
        if not self.costs.prompts:
            raise ConfigError("the table of costs has no prompts")
        return Curve(sorted((p.tokens, p.ms / 1e3) for p in self.costs.prompts)).at(tokens)


class StepTimes:
    """Times of a drafter's steps, from another engine's cost table."""

    grade = "profiled"
    spread = (UNSTATED, 0.0)

    def __init__(self, costs: EngineCosts) -> None:
        self.curve = Curve(sorted((p.batch, p.ms / 1e3) for p in costs.draft_ms))

    def seconds(self, batch: int, new_tokens: int, context: int) -> float:
        return self.curve.at(batch)

    def prompt(self, tokens: int) -> float:
        return 0.0


def read_costs(path: Path, engine: str = "sameseed") -> Profile | EngineCosts:
    """Costs from a file of `sameseed profile --json`, or of another engine. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read costs from {path} ({error}); write them: sameseed profile --json FILE"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object; write it with sameseed profile --json FILE")
    if engine == "sameseed":
        if data.get("schema") == ENGINE_SCHEMA:
            raise ConfigError(f"{path} holds the costs of {data.get('engine')}: give --engine {data.get('engine')}")
        return Profile.from_dict(data, str(path))
    if data.get("schema") != ENGINE_SCHEMA:
        raise ConfigError(
            f"{path} has schema {data.get('schema')!r}; costs of {engine} have {ENGINE_SCHEMA!r}: see "
            "docs/guides/plan.md"
        )
    costs = EngineCosts.from_dict(data, str(path))
    if costs.engine != engine:
        raise ConfigError(f"{path} holds the costs of {costs.engine}, not of {engine}: give --engine {costs.engine}")
    return costs
