"""Costs of a model that does not fit here, from two shallower ones: the time of a pass is linear in its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any

from sameseed.models.config import ModelConfig
from sameseed.study.costs import BatchDecode, Cost, Prefill, StoredModel

# Linear in the number of layers. The other numbers are settings, or follow from these.
LINEAR = ("ms", "p10", "p90", "memory_ms", "compute_ms", "bytes", "bytes_per_token", "cache_bytes", "load_s")
Results = Mapping[str, Seq[Any]]


def shallow(config: ModelConfig, layers: int) -> ModelConfig:
    """The config with only the first `layers` layers."""
    return replace(config, num_layers=layers, windows=config.windows[:layers])


def deepened(few: Results, many: Results, depths: tuple[int, int], layers: int) -> dict[str, Any]:
    """The results of a model of `layers` layers, from those of the same model with `depths` layers.

    Takes and returns the fields `costs`, `prefill`, `batch` and `stored` of a Profile. A value v is extended along the
    line through both depths: v(n) = v(a) + (v(b) - v(a)) (n - a) / (b - a), and is no less than v(b). Passes that one
    of the depths lacks are left out. The peak memory of loading is that of the deeper model, as measured.
    """
    a, b = depths
    along = (layers - a) / (b - a)
    found: dict[str, list[Any]] = {}
    for part in ("costs", "prefill", "batch", "stored"):
        known = {_key(x): x for x in few[part]}
        found[part] = [_extended(known[_key(x)], x, along) for x in many[part] if _key(x) in known]
    costs = found["costs"]
    ones = {(x.format, x.context): x for x in costs if x.rows == 1}
    found["costs"] = [replace(x, c=x.ms / ones[x.format, x.context].ms) for x in costs]
    first = {x.format: x for x in reversed(list(ones.values()))}
    found["stored"] = [
        replace(x, bandwidth_share=first[x.format].memory_ms / first[x.format].ms if x.format in first else None)
        for x in found["stored"]
    ]
    return {part: tuple(rows) for part, rows in found.items()}


def _key(x: Cost | Prefill | BatchDecode | StoredModel) -> tuple[object, ...]:
    return (x.format, x.kv_format, *(getattr(x, name, None) for name in ("context", "rows", "tokens", "batch_size")))


def _extended(few: Any, many: Any, along: float) -> Any:
    values = {}
    for name in LINEAR:
        if hasattr(many, name):
            low, high = getattr(few, name), getattr(many, name)
            values[name] = type(high)(max(high, low + (high - low) * along))
    if hasattr(many, "repeats"):
        values["repeats"] = min(few.repeats, many.repeats)
    if hasattr(many, "tokens_per_s"):
        speed = many.tokens_per_s * many.ms / values["ms"]
        values["tokens_per_s"] = speed
    if hasattr(many, "peak_share"):  # arithmetic over time, both linear
        low, high = few.peak_share * few.ms, many.peak_share * many.ms
        values["peak_share"] = max(high, low + (high - low) * along) / values["ms"]
    return replace(many, **values)
