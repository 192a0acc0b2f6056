"""Plots of load tests: tokens per second, generation time and time to first token, by concurrency or request rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.report.plot import Panel, Series, draw as draw_panels, origin

PANELS = (  # title, and the value of a record or of one repetition
    ("output tokens a second", lambda r: r["output_tokens_per_s"]),
    ("generation time: median seconds", lambda r: r["e2e_ms"]["p50"] and r["e2e_ms"]["p50"] / 1e3),
    ("time to first token: median ms", lambda r: r["ttft_ms"]["p50"]),
)


def draw(records: Seq[Mapping[str, Any]], path: Path) -> tuple[Path, Path]:
    """Plot a run's records as PNG and SVG: one row per shape, one line per arm. Raises ConfigError."""
    shapes = dict.fromkeys(r["config"]["lengths"] for r in records)
    panels = [
        _panel(f"{name} ({shape})", [r for r in records if r["config"]["lengths"] == shape], of)
        for shape in shapes
        for name, of in PANELS
    ]
    about = origin(records[0], f"medians of {len(records[0]['repetitions'])} runs, bands: least to most")
    return draw_panels(panels, path, about=about)


def _panel(title: str, records: Seq[Mapping[str, Any]], of: Callable[[Any], float | None]) -> Panel:
    """One line per arm through the medians, with a band from the least to the largest repetition."""
    closed = records[0]["config"]["rate"] is None
    x = "concurrency" if closed else "rate"
    series = []
    for label in dict.fromkeys(r["config"]["label"] for r in records):
        mine = [r for r in records if r["config"]["label"] == label and of(r) is not None]
        mine.sort(key=lambda r: r["config"][x])
        each = [[v for s in r["repetitions"] if (v := of(s)) is not None] for r in mine]
        points = [(r["config"][x], value) for r in mine if (value := of(r)) is not None]
        series.append(Series(label, points, spread=[(min(v), max(v)) for v in each]))
    return Panel(title, "clients at once" if closed else "requests a second", series)
