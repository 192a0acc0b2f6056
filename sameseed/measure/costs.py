"""Cost curves: how long a pass over M rows takes in each number format, and c(M), that time over one row's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from sameseed import fields
from sameseed.cost.curve import ENGINE_SCHEMA, P10_TO_P90, Curve, read_table
from sameseed.cost.round import Gap, RoundCost
from sameseed.errors import ConfigError, nearest
from sameseed.measure.limits import Limits
from sameseed.report.schemas import PROFILE_SCHEMA

MOST_MS = 3.6e6  # milliseconds of a pass beyond which a profile cannot be right: an hour
Report = Callable[[str, float, float], None]  # stage, done, total


@dataclass(frozen=True)
class Cost:
    """A pass over a chain of `rows` new tokens after `context` cached ones. Times in milliseconds."""

    format: str
    kv_format: str
    context: int
    rows: int
    ms: float  # median
    c: float  # `ms` over that of one row
    p10: float  # percentiles of the milliseconds
    p90: float
    repeats: int
    memory_ms: float  # what reading would take at the machine's limits
    compute_ms: float  # the same of the arithmetic


@dataclass(frozen=True)
class Prefill:
    """Prefill of a prompt in one pass. `peak_share`: its least time by the arithmetic, over the time taken."""

    format: str
    kv_format: str
    tokens: int
    ms: float
    p10: float
    p90: float
    repeats: int
    tokens_per_s: float
    peak_share: float


@dataclass(frozen=True)
class BatchDecode:
    """One decode pass: one new token for each of `batch_size` sequences with `context` cached tokens."""

    format: str
    kv_format: str
    context: int
    batch_size: int
    ms: float
    p10: float
    p90: float
    repeats: int
    tokens_per_s: float


@dataclass(frozen=True)
class StoredModel:
    """A model in one format: its size, and the cost of loading."""

    format: str
    kv_format: str
    bytes: int
    bytes_per_token: float  # that one token reads: weights, and the KV cache of the first context
    cache_bytes: int
    bandwidth_share: float | None  # least time to read those at the machine's limit, over the time of one row
    peak: str  # arithmetic of the matrix products: "int8", "bf16" or "fp32"
    load_s: float
    load_peak_bytes: int  # peak memory while loading, less the memory that was resident before


@dataclass(frozen=True)
class ShapeCosts:
    """All measurements of one shape."""

    shape: Mapping[str, Any]
    costs: tuple[Cost, ...]
    prefill: tuple[Prefill, ...]
    batch: tuple[BatchDecode, ...]
    stored: tuple[StoredModel, ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats with costs, in the order measured."""
        return tuple(dict.fromkeys(x.format for x in self.costs))

    def curves(self, format: str) -> dict[int, list[Cost]]:
        """The costs of a format by context, ascending in both. Raises ConfigError for a format not measured."""
        found: dict[int, list[Cost]] = {}
        for x in sorted(self.costs, key=lambda x: (x.context, x.rows)):
            if x.format == format:
                found.setdefault(x.context, []).append(x)
        if not found:
            measured, hint = ", ".join(self.formats) or "none", nearest(format, self.formats)
            raise ConfigError(f"format {format!r} was not profiled{hint} (there are: {measured})")
        return found

    def curve(self, format: str) -> Curve:
        """Seconds of passes at the shortest context; the longest gives what cached tokens cost. Raises ConfigError."""
        curves = self.curves(format)
        base, long = min(curves), max(curves)
        near, far = (Curve([(x.rows, x.ms / 1e3) for x in curves[at]], at) for at in (base, long))
        if long == base:
            return near
        few, many = near.rows[0], near.rows[-1]
        slow = [(far.at(m) - near.at(m)) / (long - base) for m in (few, many)]
        per_row = max(0.0, (slow[1] - slow[0]) / (many - few)) if many > few else 0.0
        near.per_token, near.per_row = max(0.0, slow[0] - few * per_row), per_row
        return near

    def cost(self, format: str, gap: float = 0.0) -> RoundCost:
        """The costs of rounds, with `gap` seconds between passes. Raises ConfigError for a format not profiled."""
        prompts = sorted((p.tokens, p.ms / 1e3) for p in self.prefill if p.format == format)
        spreads = [math.log(x.p90 / x.p10) for x in self.costs if x.format == format and 0 < x.p10 <= x.p90]
        level = median(spreads) / P10_TO_P90 if spreads else 0.0
        read = Curve([(0, 0.0), *prompts]).at if prompts else None
        return RoundCost(self.curve(format), (), Gap(gap, gap), read, "profiled", level)


@dataclass(frozen=True)
class Profile(ShapeCosts):
    """A profile. `draft`: the measurements of a draft model, whose passes alternated with the target's."""

    limits: Limits
    machine: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    backend: str = ""
    interleaved: bool = True  # False: too little memory to load all formats; one was measured after the other
    interrupted: bool = False
    peak_memory_bytes: int = 0
    commit: str = ""
    date: str = ""
    draft: ShapeCosts | None = None

    @classmethod
    def read(cls, path: Path) -> Profile:
        """The profile in a file of `sameseed profile --json`. Raises ConfigError."""
        data = read_table(path)
        if data.get("schema") == ENGINE_SCHEMA:
            raise ConfigError(f"{path} is of `tune --engine {data.get('engine')}`: give a file of `profile --json`")
        return cls.from_dict(data, str(path))

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain data for JSON."""
        plain = json.loads(json.dumps(asdict(self)))  # with lists, as a reader of the file gets them
        return {"schema": PROFILE_SCHEMA, **plain, "limits": self.limits.as_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "the profile") -> Profile:
        """The inverse of as_dict; further keys are left out. Raises ConfigError for what `profile` did not write."""
        if data.get("schema") != PROFILE_SCHEMA:
            raise ConfigError(
                f"{where} has schema {data.get('schema')!r}, this version reads {PROFILE_SCHEMA!r}; profile again"
            )
        try:
            known = {name: data[name] for name in fields.hints(cls) if name in data}
            found = fields.parse(cls, {**known, "limits": Limits.from_dict(data["limits"])}, where)
        except (ConfigError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where} lacks a part, or a part is wrong ({error}); profile again") from None
        parts = [part for part in (found, found.draft) if part is not None]
        passes = [(x.rows, x.ms) for part in parts for x in part.costs]
        passes += [(x.tokens, x.ms) for part in parts for x in part.prefill]
        passes += [(x.batch_size, x.ms) for part in parts for x in part.batch]
        if not all(size >= 1 and 0 < ms < MOST_MS for size, ms in passes):
            raise ConfigError(f"{where} has passes without rows, or of impossible times; profile again")
        return found
