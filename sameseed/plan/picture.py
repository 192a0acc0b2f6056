"""Plots of a tuning run: predicted against measured speed, and speed against quality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError
from sameseed.plan.tune import TuneOutcome


def draw(found: TuneOutcome, path: Path) -> None:
    """Write a PNG: predicted against measured speed-ups of settings that ran, and formats by speed and quality.

    Right predictions lie on the diagonal. Raises ConfigError where matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install '.[study]', or leave it out") from None
    several = len(frontier(found)) > 1
    figure = Figure(figsize=(12.4 if several else 6.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + several, squeeze=False)[0]
    _predictions(panels[0], found)
    if several:
        _frontier(panels[1], found)
    for panel in panels:
        panel.grid(alpha=0.25, linewidth=0.6)
    figure.savefig(path, dpi=150)


def frontier(found: TuneOutcome) -> list[tuple[str, Any, Any, bool]]:
    """For each format that ran: name, perplexity ratio, speed-up of its fastest setting, and is it Pareto-optimal?"""
    made: dict[tuple[str, str], tuple[str, Any, Any]] = {}
    for c in found.order:
        setting = c.prospect.candidate
        key, speed = (setting.format, setting.kv_format), found.speedup(c)
        if key in found.quality and (key not in made or speed.value > made[key][2].value):
            made[key] = setting.formats or "auto", found.quality[key], speed
    rows = sorted(made.values(), key=lambda row: row[1].value)
    return [
        (name, cost, speed, not any(s.value > speed.value and q.value <= cost.value for _, q, s in rows))
        for name, cost, speed in rows
    ]


def _frontier(panel: Any, found: TuneOutcome) -> None:
    rows = frontier(found)
    for name, cost, speed, best in rows:
        _points(panel, [(cost, speed)], "o", color="C0" if best else "0.6")
        panel.annotate(name, (cost.value, speed.value), (5, -8), textcoords="offset points", fontsize=7)
    edge = [(cost.value, speed.value) for _, cost, speed, best in rows if best]
    panel.step([x for x, _ in edge], [y for _, y in edge], where="post", color="C0", linewidth=0.8)
    if found.asked.quality is not None:
        panel.axvline(found.asked.quality, color="C3", linewidth=0.8, label=f"--quality {found.asked.quality:g}")
        panel.legend()
    panel.set_xlabel("perplexity over the checkpoint's (95 % interval)")
    panel.set_ylabel("speed over plain decoding of the first format")
    panel.set_title("speed against quality", loc="left")


def _points(panel: Any, pairs: list[tuple[Any, Any]], marker: str, **given: Any) -> None:
    """Plot pairs of figures with their intervals in both directions."""
    values = [[x.value for x in axis] for axis in zip(*pairs, strict=True)]
    bars = [[[x.value - x.low for x in axis], [x.high - x.value for x in axis]] for axis in zip(*pairs, strict=True)]
    panel.errorbar(*values, xerr=bars[0], yerr=bars[1], fmt=marker, markersize=5, elinewidth=0.7, **given)


def _predictions(panel: Any, found: TuneOutcome) -> None:
    top = 1.0
    for batch, marker in zip(sorted(found.asked.batches), "os^Dv<>*PX"):
        points = [(found.speedup(c, batch), found.predicted(c.prospect, batch), c) for c in found.order]
        _points(panel, [(m, p) for m, p, _ in points], marker, label=f"batch {batch}")
        top = max(top, *(max(m.value, p.value) for m, p, _ in points))
        for m, p, c in points:
            panel.annotate(c.label, (m.value, p.value), (5, -8), textcoords="offset points", fontsize=6)
    panel.plot([0, 1.1 * top], [0, 1.1 * top], color="0.6", linewidth=0.8)
    panel.axvline(1.0, color="0.8", linewidth=0.8)
    panel.set_xlabel("measured: speed over plain decoding")
    panel.set_ylabel("predicted")
    panel.set_title(f"{found.asked.model}: predicted against measured", loc="left")
    panel.legend()
