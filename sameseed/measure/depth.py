"""Costs of a model that does not fit here, from two shallower ones: a pass takes as long for each byte of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any

from sameseed.measure.costs import BatchDecode, Cost, Prefill, StoredModel
from sameseed.models.config import ModelConfig

LINEAR = ("memory_ms", "compute_ms", "bytes", "bytes_per_token", "cache_bytes")  # known exactly at both depths
MEASURED = ("ms", "p10", "p90", "load_s")
Results = Mapping[str, Seq[Any]]
Row = Cost | Prefill | BatchDecode | StoredModel


def shallow(config: ModelConfig, layers: int) -> ModelConfig:
    """The config with only the first `layers` layers."""
    return replace(config, num_layers=layers, windows=config.windows[:layers])


def deepened(few: Results, many: Results, depths: tuple[int, int], layers: int) -> dict[str, Any]:
    """The results of a model of `layers` layers, from those of the same model with `depths` layers.

    Takes and returns the fields `costs`, `prefill`, `batch` and `stored` of a Profile. Sizes and least work lie on the
    line through both depths. Times do not, for a line would multiply their noise: the sum of both depths' times grows
    in proportion to the bytes that a token reads. A prompt's time grows with the layers, since its LM head has one row.
    Passes that one of the depths lacks are left out. The peak memory of loading is the deeper model's, as measured.
    """
    a, b = depths
    along = (layers - a) / (b - a)
    ends = {x.format: x for x in few["stored"]}, {x.format: x for x in many["stored"]}
    grown = {
        form: _on_line(low.bytes_per_token, high.bytes_per_token, along) / (low.bytes_per_token + high.bytes_per_token)
        for form, high in ends[1].items()
        if (low := ends[0].get(form))
    }
    found: dict[str, list[Any]] = {}
    for part in ("costs", "prefill", "batch", "stored"):
        known = {_key(x): x for x in few[part]}
        pairs = [(known[_key(x)], x) for x in many[part] if _key(x) in known]
        found[part] = [
            _extended(low, high, along, layers / (a + b) if part == "prefill" else grown[high.format])
            for low, high in pairs
        ]
    ones = {(x.format, x.context): x for x in found["costs"] if x.rows == 1}
    found["costs"] = [replace(x, c=x.ms / ones[x.format, x.context].ms) for x in found["costs"]]
    first = {x.format: x for x in reversed(list(ones.values()))}
    found["stored"] = [
        replace(x, bandwidth_share=first[x.format].memory_ms / first[x.format].ms if x.format in first else None)
        for x in found["stored"]
    ]
    return {part: tuple(rows) for part, rows in found.items()}


def _on_line(low: float, high: float, along: float) -> float:
    return low + (high - low) * along


def _key(x: Row) -> tuple[object, ...]:
    return (x.format, x.kv_format, *(getattr(x, name, None) for name in ("context", "rows", "tokens", "batch_size")))


def _extended(few: Any, many: Any, along: float, grown: float) -> Any:
    values: dict[str, Any] = {}
    for name in LINEAR:
        if hasattr(many, name):
            low, high = getattr(few, name), getattr(many, name)
            values[name] = type(high)(_on_line(low, high, along))
    for name in MEASURED:
        if hasattr(many, name):
            values[name] = (getattr(few, name) + getattr(many, name)) * grown
    if hasattr(many, "repeats"):
        values["repeats"] = min(few.repeats, many.repeats)
    if hasattr(many, "tokens_per_s"):
        values["tokens_per_s"] = many.tokens_per_s * many.ms / values["ms"]
    if hasattr(many, "peak_share"):  # least time over time
        values["peak_share"] = _on_line(few.peak_share * few.ms, many.peak_share * many.ms, along) / values["ms"]
    return replace(many, **values)
