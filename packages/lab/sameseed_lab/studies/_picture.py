"""Draws a study's plots as PNG and SVG, in the style of the other plots. Published figures are dashed or hatched."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.study.plot import COLOURS, LIMIT, MARKERS, STYLE, plot_paths, save
from sameseed_lab.studies._study import Panel, Plot

COLUMNS = 3  # most panels in a row


def draw(plot: Plot, path: Path) -> tuple[Path, Path]:
    """Draw a plot; returns the paths of the PNG and the SVG. Raises ConfigError if matplotlib is missing."""
    paths = plot_paths(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(COLUMNS, len(plot.panels))
    down = -(-len(plot.panels) // across)
    labels = list(dict.fromkeys(s.label for panel in plot.panels for s in panel.series))
    with pyplot.rc_context(STYLE):
        figure, grid = pyplot.subplots(down, across, figsize=(4.1 * across, 3.2 * down), squeeze=False)
        flat = list(grid.flat)
        for axes in flat[len(plot.panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(flat, plot.panels):
            (_bars if panel.bars else _lines)(axes, panel, labels)
            axes.set_title(panel.title, loc="left", fontsize=9)
            axes.set_xlabel(panel.x)
            axes.grid(alpha=0.25, linewidth=0.6, axis="y" if panel.bars else "both")
            if panel.level is not None:
                axes.axhline(panel.level, color="0.5", linestyle=LIMIT)
        _legend(figure, flat)
        save(figure, paths)
    return paths


def _legend(figure: Any, flat: Seq[Any]) -> None:
    """Draw one legend for all panels, below them."""
    handles = {name: h for axes in flat for h, name in zip(*axes.get_legend_handles_labels())}
    inches = 0.6 + 0.07 * max(map(len, handles), default=0)  # width of the longest entry
    columns = max(1, min(4, int(figure.get_figwidth() / inches)))
    below = 0.26 * (-(-len(handles) // columns) + 0.5) / figure.get_figheight() if len(handles) > 1 else 0.0
    if below:
        look = {"loc": "lower center", "ncol": columns, "frameon": False, "fontsize": 8}
        figure.legend(list(handles.values()), list(handles), **look)
    figure.tight_layout(rect=(0, below, 1, 1))


def _name(label: str, published: bool) -> str:
    return f"{label} (published)" if published else label


def _colour(index: int) -> str:
    return (*COLOURS, "0.6")[index % (len(COLOURS) + 1)]


def _lines(axes: Any, panel: Panel, labels: Seq[str]) -> None:
    ticks = sorted({x for s in panel.series for x, _ in s.points})
    for s in panel.series:
        i = labels.index(s.label)
        look: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 5,
            "linestyle": ("-", "-.")[i // len(COLOURS) % 2],
        }
        if s.published:
            look |= {"linestyle": "--", "markerfacecolor": "none", "alpha": 0.6}
        axes.plot([x for x, _ in s.points], [y for _, y in s.points], label=_name(s.label, s.published), **look)
    if ticks and ticks[-1] > 8 * max(ticks[0], 1):
        axes.set_xscale("log", base=2)
    if len(ticks) <= 12:
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
    axes.set_ylim(0, 1.08 * max((y for s in panel.series for _, y in s.points), default=1.0) or 1.0)


def _bars(axes: Any, panel: Panel, labels: Seq[str]) -> None:
    names = list(dict.fromkeys(x for s in panel.series for x, _ in s.points))
    beside = 1 if panel.stacked else max(1, len(panel.series))
    width, below = 0.8 / beside, dict.fromkeys(names, 0.0)
    for n, s in enumerate(panel.series):
        shift = 0.0 if panel.stacked else (n - (beside - 1) / 2) * width
        place = [names.index(x) + shift for x, _ in s.points]
        colour = _colour(labels.index(s.label))
        look: dict[str, Any] = {"color": colour}
        if s.published:
            look = {"color": "none", "edgecolor": colour, "hatch": "///", "linewidth": 0.8}
        if panel.stacked:
            look["bottom"] = [below[x] for x, _ in s.points]
            below |= {x: below[x] + y for x, y in s.points}
        axes.bar(place, [y for _, y in s.points], width, label=_name(s.label, s.published), **look)
    turned = max((len(str(n)) for n in names), default=0) * len(names) > 36
    axes.set_xticks(range(len(names)), [str(n) for n in names], rotation=35 if turned else 0, fontsize=8)
    if turned:
        for text in axes.get_xticklabels():
            text.set_ha("right")
