"""The picture of a tuning: what was predicted against what was measured."""

from __future__ import annotations

from pathlib import Path

from sameseed.errors import ConfigError
from sameseed.plan.tune import TuneOutcome


def draw(found: TuneOutcome, path: Path) -> None:
    """Write it as PNG: a point for each setting that ran and batch size, on the diagonal where predictions were right.

    Raises ConfigError where matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install '.[study]', or leave it out") from None
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    top = 1.0
    for batch, marker in zip(sorted(found.asked.batches), "os^Dv<>*PX"):
        points = [(found.speedup(c, batch), found.predicted(c.prospect, batch), c) for c in found.order]
        xs, ys = [m.value for m, _, _ in points], [p.value for _, p, _ in points]
        panel.errorbar(
            xs,
            ys,
            xerr=[[m.value - m.low for m, _, _ in points], [m.high - m.value for m, _, _ in points]],
            yerr=[[p.value - p.low for _, p, _ in points], [p.high - p.value for _, p, _ in points]],
            fmt=marker,
            markersize=5,
            elinewidth=0.7,
            label=f"batch {batch}",
        )
        top = max(top, *xs, *ys)
        for m, p, c in points:
            panel.annotate(
                c.prospect.candidate.label, (m.value, p.value), (5, -8), textcoords="offset points", fontsize=6
            )
    panel.plot([0, 1.1 * top], [0, 1.1 * top], color="0.6", linewidth=0.8)
    panel.axvline(1.0, color="0.8", linewidth=0.8)
    panel.set_xlabel("measured: speed over plain decoding")
    panel.set_ylabel("predicted")
    panel.set_title(f"{found.asked.model}: predicted against measured", loc="left")
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.legend()
    figure.savefig(path, dpi=150)
