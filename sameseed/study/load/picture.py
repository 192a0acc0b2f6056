"""Plots of load tests: tokens per second, generation time and time to first token, by concurrency or request rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.study.plot import COLOURS, MARKERS, STYLE, plot_paths, save

PANELS = (  # title, and the value of a record or of one repetition
    ("output tokens a second", lambda r: r["output_tokens_per_s"]),
    ("generation time: median seconds", lambda r: r["e2e_ms"]["p50"] and r["e2e_ms"]["p50"] / 1e3),
    ("time to first token: median ms", lambda r: r["ttft_ms"]["p50"]),
)


def draw(records: Seq[Mapping[str, Any]], path: Path) -> tuple[Path, Path]:
    """Plot a run's records as PNG and SVG: one row per shape, one line per arm. Raises ConfigError."""
    paths = plot_paths(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(r["config"]["lengths"] for r in records))
    rows, first = len(shapes), records[0]
    about = [first["config"]["model"], str(first["machine"].get("cpu", "")), f"{first['machine'].get('cores')} cores"]
    about += [f"commit {first['commit']}", first["time"][:10]]
    about += [f"medians of {len(first['repetitions'])}, bands: least to most"]
    with pyplot.rc_context(STYLE):
        figure, grid = pyplot.subplots(rows, len(PANELS), figsize=(12, 3.4 * rows + 0.7), squeeze=False)
        for shape, panels in zip(shapes, grid, strict=True):
            for panel, (name, of) in zip(panels, PANELS, strict=True):
                _panel(panel, [r for r in records if r["config"]["lengths"] == shape], of)
                panel.set_title(f"{name} ({shape})", loc="left", fontsize=9)
        grid[0][0].legend(frameon=False)
        figure.text(0.01, 0.005, "  ·  ".join(p for p in about if p), fontsize=7.5, color="0.35")
        figure.tight_layout(rect=(0, 0.1 / rows, 1, 1))
        save(figure, paths)
    return paths


def _panel(panel: Any, records: Seq[Mapping[str, Any]], of: Callable[[Any], float | None]) -> None:
    """One line per arm through the medians, with a band from the least to the largest repetition."""
    closed = records[0]["config"]["rate"] is None
    name = "concurrency" if closed else "rate"
    for i, label in enumerate(dict.fromkeys(r["config"]["label"] for r in records)):
        mine = [r for r in records if r["config"]["label"] == label and of(r) is not None]
        mine.sort(key=lambda r: r["config"][name])
        x = [r["config"][name] for r in mine]
        line = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5}
        panel.plot(x, [of(r) for r in mine], label=label, **line)
        each = [[v for s in r["repetitions"] if (v := of(s)) is not None] for r in mine]
        low, high = ([limit(v) for v in each] for limit in (min, max))
        panel.fill_between(x, low, high, color=line["color"], alpha=0.13, linewidth=0)
    ticks = sorted({r["config"][name] for r in records})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{t:g}" for t in ticks])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.set_xlabel("clients at once" if closed else "requests a second")
