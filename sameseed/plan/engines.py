"""Costs of another engine's rounds, kept in a file between runs of `tune --engine`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sameseed import fields
from sameseed.cost.curve import ENGINE_SCHEMA, Curve, read_table
from sameseed.errors import ConfigError


@dataclass(frozen=True)
class EnginePass:
    """Milliseconds of one pass over `rows` rows in all, of `batch` sequences."""

    batch: int
    rows: int
    ms: float


@dataclass(frozen=True)
class EngineCosts:
    """Rounds of another engine: a JSON file with these fields and `"schema": "sameseed.engine-costs/1"`.

    `draft` names the draft whose time `passes` include; `survival`: the share of `rounds` rounds in which each place of
    that draft was right.
    """

    engine: str
    passes: tuple[EnginePass, ...]
    machine: str = ""
    draft: str = ""
    survival: tuple[float, ...] = ()
    rounds: int = 0

    def __post_init__(self) -> None:
        rows = all(1 <= p.batch <= p.rows for p in self.passes)
        if not self.passes or not rows or not all(0 < p.ms < math.inf for p in self.passes):
            raise ConfigError("costs of an engine: passes with batch >= 1, rows >= batch and ms > 0, one at least")

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of sequences that were measured, in ascending order."""
        return tuple(sorted({p.batch for p in self.passes}))

    @cached_property
    def _curves(self) -> dict[int, Curve]:
        return {b: Curve(sorted((p.rows, p.ms / 1e3) for p in self.passes if p.batch == b)) for b in self.batches}

    def cost(self, rows: float, batch: float = 1.0, context: float = 0.0) -> float:
        """Seconds of a pass (`Passes`): linear in rows at each measured batch size, and between batch sizes."""
        if len(self._curves) == 1:
            return next(iter(self._curves.values())).at(rows)
        return Curve([(b, curve.at(b * rows / batch)) for b, curve in self._curves.items()]).at(batch)


def read_costs(path: Path, engine: str) -> EngineCosts:
    """Costs of another engine from a file. Raises ConfigError."""
    data = read_table(path)
    if data.get("schema") != ENGINE_SCHEMA:
        raise ConfigError(
            f"{path} has schema {data.get('schema')!r}, not {ENGINE_SCHEMA!r}; name another file with --cost"
        )
    costs = fields.parse(EngineCosts, {k: v for k, v in data.items() if k != "schema"}, str(path))
    if costs.engine != engine:
        raise ConfigError(f"{path} holds the costs of {costs.engine}, not of {engine}: name another file with --cost")
    return costs
