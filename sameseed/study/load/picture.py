"""The load as a picture: tokens a second, generation time and time to the first token against concurrency (or rate)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.study.plot import COLOURS, MARKERS, STYLE, plot_paths, save

PANELS = (
    ("output tokens a second", lambda r: r["output_tokens_per_s"], lambda s: s["output_tokens_per_s"]),
    ("generation time: median seconds", lambda r: _seconds(r["e2e_ms"]), lambda s: _seconds(s["e2e_ms"])),
    ("time to first token: median ms", lambda r: r["ttft_ms"]["p50"], lambda s: s["ttft_ms"]["p50"]),
)


def draw(records: Seq[Mapping[str, Any]], path: Path) -> tuple[Path, Path]:
    """Write the picture of a run's records as PNG and SVG: a row a shape, a line an arm. Raises ConfigError."""
    paths = plot_paths(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(r["config"]["lengths"] for r in records))
    rows = len(shapes)
    with pyplot.rc_context(STYLE):
        figure, grid = pyplot.subplots(rows, len(PANELS), figsize=(12, 3.4 * rows + 0.7), squeeze=False)
        for shape, panels in zip(shapes, grid, strict=True):
            for panel, (name, middle, one) in zip(panels, PANELS, strict=True):
                _panel(panel, [r for r in records if r["config"]["lengths"] == shape], middle, one)
                panel.set_title(f"{name} ({shape})", loc="left", fontsize=9)
        grid[0][0].legend(frameon=False)
        figure.text(0.01, 0.005, _footnote(records), fontsize=7.5, color="0.35")
        figure.tight_layout(rect=(0, 0.1 / rows, 1, 1))
        save(figure, paths)
    return paths


def _panel(panel: Any, records: Seq[Mapping[str, Any]], middle: Any, one: Any) -> None:
    """A line an arm through the medians, and a band over the repetitions."""
    closed = records[0]["config"]["rate"] is None
    name = "concurrency" if closed else "rate"
    for i, label in enumerate(dict.fromkeys(r["config"]["label"] for r in records)):
        mine = sorted((r for r in records if r["config"]["label"] == label), key=lambda r: r["config"][name])
        mine = [r for r in mine if middle(r) is not None]
        x = [r["config"][name] for r in mine]
        colour = COLOURS[i % len(COLOURS)]
        panel.plot(
            x, [middle(r) for r in mine], label=label, color=colour, marker=MARKERS[i % len(MARKERS)], markersize=5
        )
        each = [[v for s in r["repetitions"] if (v := one(s)) is not None] for r in mine]
        panel.fill_between(x, [min(v) for v in each], [max(v) for v in each], color=colour, alpha=0.13, linewidth=0)
    ticks = sorted({r["config"][name] for r in records})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{t:g}" for t in ticks])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.set_xlabel("clients at once" if closed else "requests a second")


def _seconds(spread: Mapping[str, float | None]) -> float | None:
    return None if spread["p50"] is None else spread["p50"] / 1e3


def _footnote(records: Seq[Mapping[str, Any]]) -> str:
    first = records[0]
    c, machine = first["config"], first["machine"]
    repeat = len(first["repetitions"])
    parts = [c["model"], str(machine.get("cpu", "")), f"{machine.get('cores')} cores", f"commit {first['commit']}"]
    parts += [first["time"][:10], f"medians of {repeat}, bands: least to most"]
    return "  ·  ".join(p for p in parts if p)
