"""Plots of a tuning run: predicted against measured speed, and speed against quality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sameseed.plan.tune import TuneOutcome
from sameseed.report import record
from sameseed.report.plot import Panel, Series, draw as draw_panels
from sameseed.tuned import TunedFigure


def draw(outcome: TuneOutcome, path: Path) -> tuple[Path, Path]:
    """Write PNG and SVG: predicted against measured speed-ups, formats by speed and quality. Raises ConfigError."""
    asked = outcome.asked
    series = []
    for batch in sorted(asked.batches):
        pairs = [(outcome.speedup(c, batch), c.over(outcome.plain, batch)) for c in outcome.order]
        series.append(_points(f"batch {batch}", pairs, [c.label for c in outcome.order]))
    x = "measured: speed over plain decoding"
    panels = [Panel("predicted against measured", x, series, "points", "predicted", diagonal=True)]
    if len(rows := frontier(outcome)) > 1:
        kinds = {"fastest at its quality": True, "slower than a format as good": False}
        shown = {label: [row for row in rows if row[3] == best] for label, best in kinds.items()}
        series = [
            _points(label, [(cost, speed) for _, cost, speed, _ in its], [row[0] for row in its])
            for label, its in shown.items()
            if its
        ]
        x, y = "perplexity over the checkpoint's (95 % interval)", "speed over plain decoding of the first format"
        panels.append(Panel("speed against quality", x, series, "points", y))
    about = f"{record.machine()['cpu']}  ·  {len(asked.prompts)} prompts, 80 % intervals  ·  commit {record.commit()}"
    return draw_panels(panels, path, record.model_name(asked.model), about)


def frontier(outcome: TuneOutcome) -> list[tuple[str, Any, Any, bool]]:
    """For each format that ran: name, perplexity ratio, speed-up of its fastest setting, and is it Pareto-optimal?"""
    made: dict[tuple[str, str], tuple[str, Any, Any]] = {}
    for c in outcome.order:
        setting = c.setting
        key, speed = (setting.format, setting.kv_format), outcome.speedup(c)
        if key in outcome.quality and (key not in made or speed.value > made[key][2].value):
            made[key] = setting.formats or "auto", outcome.quality[key], speed
    rows = sorted(made.values(), key=lambda row: row[1].value)
    return [
        (name, cost, speed, not any(s.value > speed.value and q.value <= cost.value for _, q, s in rows))
        for name, cost, speed in rows
    ]


def _points(label: str, pairs: list[tuple[TunedFigure, TunedFigure]], names: list[str]) -> Series:
    """Pairs of figures with their intervals in both directions."""
    points = [(x.value, y.value) for x, y in pairs]
    across = [(x.low, x.high) for x, _ in pairs]
    return Series(label, points, spread=[(y.low, y.high) for _, y in pairs], spread_x=across, names=names)
