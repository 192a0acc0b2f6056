"""One kind of plot: panels of lines, bars or points, with what a reader must know below them, as PNG and SVG."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

from sameseed.errors import ConfigError
from sameseed.report.record import require

# Colours that colour-blind readers can tell apart (after Okabe and Ito; further ones after Tol).
COLOURS: tuple[str, ...] = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A5230")
COLOURS += ("#332288", "#DDCC77", "#882255", "#999933", "#AA4499", "#44AA99")
MOST = 6  # series of a panel
GREYS = ("0.35", "0.55", "0.7")  # of published series
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DOTTED = (0, (1, 1.4))
STYLE: Any = {"font.size": 9, "svg.hashsalt": "sameseed", "axes.spines.top": False, "axes.spines.right": False}
Spread = Seq[tuple[float, float]]  # low and high of each point


@dataclass(frozen=True)
class Series:
    """Points of one colour, which its label decides; a label may stand in several panels."""

    label: str
    points: Seq[tuple[Any, float]]
    published: bool = False  # grey, and dashed or hatched; the label names paper, model and hardware
    spread: Spread = ()  # of y: a band, or intervals
    spread_x: Spread = ()  # of points, as `names`
    names: Seq[str] = ()
    limit: bool = False  # a dotted line without points or a legend entry


def lines(points: Iterable[tuple[str, Any, float, Seq[float]]]) -> list[Series]:
    """A series for each label of (label, x, y, repetitions) in order of x, its band from the least to the most."""
    found: dict[str, list[tuple[Any, float, tuple[float, float]]]] = {}
    for label, x, y, each in points:
        found.setdefault(label, []).append((x, y, (min(each), max(each))))
    ordered = {label: sorted(its) for label, its in found.items()}
    return [Series(label, [p[:2] for p in its], spread=[p[2] for p in its]) for label, its in ordered.items()]


@dataclass(frozen=True)
class Panel:
    """One diagram."""

    title: str
    x: str
    series: Seq[Series]
    kind: Literal["lines", "bars", "across", "points"] = "lines"  # `bars` stand, or lie beside long names (`across`)
    y: str = ""
    level: float | None = None  # a line at this y (at x where bars lie, and begin), e.g. 1 for no gain
    stacked: bool = False
    diagonal: bool = False  # x = y
    form: str = ""  # number format of values beside bars that lie
    top: float | None = None  # where the axis ends, for panels with one scale


def shown(panels: Iterable[Panel]) -> list[Panel]:
    """The panels with points of our own. One of more than `MOST` series is parted; its first has the published ones."""
    found = []
    for panel in panels:
        ours = [s for s in panel.series if s.points and not s.published and not s.limit]
        others = [s for s in panel.series if s.points and (s.published or s.limit)]
        published = sum(s.published for s in others)
        count = 1 if panel.stacked else ceil((len(ours) + published) / MOST)
        first = len(ours) if count < 2 else max(1, min(ceil(len(ours) / count), MOST - published))
        step = ceil((len(ours) - first) / max(1, count - 1)) or 1
        parts = [ours[:first], *(ours[i : i + step] for i in range(first, len(ours), step))]
        highest = max((max(y, *ends) for s in (*ours, *others) for (_, y), ends in _with_spread(s)), default=0.0)
        top = panel.top or (1.08 * highest if len(parts) > 1 else None)  # parts have one scale
        for number, part in enumerate(parts if ours else (), 1):
            labels, places = {s.label for s in part}, {x for s in part for x, _ in s.points}
            beside = [replace(s, points=[p for p in s.points if p[0] in places]) if s.published else s for s in others]
            beside = [s for s in beside if s.points and (s.label in labels if s.limit else number == 1)]
            title = panel.title if len(parts) == 1 else f"{panel.title} ({number} of {len(parts)})"
            found.append(replace(panel, title=title, series=[*part, *beside], top=top))
    return found


def plot_paths(path: Path) -> tuple[Path, Path]:
    """Paths of the PNG and the SVG for `path`. Raises ConfigError for another suffix, or without matplotlib."""
    if path.suffix.lower() not in ("", ".png", ".svg"):
        raise ConfigError(f"a plot is written as .png and .svg, not as {path.suffix!r}; name it e.g. {path.stem}.png")
    require("a plot", "study", "matplotlib")
    return path.with_suffix(".png"), path.with_suffix(".svg")


def source(record: Mapping[str, Any], *more: str) -> str:
    """What a plot shown alone must say of its source: model, machine, `more`, commit and day of a record."""
    machine, config = record["machine"], record.get("config", {})
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}" if machine.get("cores") else ""
    parts = (config.get("model", ""), machine.get("gpu") or machine.get("cpu") or "", cores, *more)
    day = str(record.get("time", ""))[:10]
    return "  ·  ".join(str(p) for p in (*parts, f"commit {record['commit']}", day) if p)


def draw(panels: Seq[Panel], path: Path, title: str = "", about: str = "", columns: int = 3) -> tuple[Path, Path]:
    """Draw panels, at most `columns` in a row; returns the PNG and the SVG. ConfigError: a suffix, no matplotlib."""
    paths = plot_paths(path)
    with _drawn(shown(panels), title, about, columns) as figure:
        for file, date in zip(paths, (None, {"Date": None})):
            figure.savefig(file, dpi=150, metadata=date, bbox_inches="tight", pad_inches=0.08)
    return paths


def svg(panel: Panel) -> bytes:
    """One panel as SVG, for a page that lays out panels by itself."""
    content = io.BytesIO()
    with _drawn([panel], "", "", 1) as figure:
        figure.savefig(content, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.08)
    return content.getvalue()


@contextmanager
def _drawn(panels: Seq[Panel], title: str, about: str, columns: int) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(columns, len(panels))
    down = -(-len(panels) // across)
    rows = max((len(s.points) for p in panels if p.kind == "across" for s in p.series), default=0)
    series = [s for panel in panels for s in panel.series]
    looks = dict[str, tuple[str, int]]()
    for published, palette in ((False, COLOURS), (True, GREYS)):
        labels = dict.fromkeys(s.label for s in series if s.published == published)
        looks |= {label: (palette[i % len(palette)], i) for i, label in enumerate(labels)}
    kinds = {"lines": _lines, "bars": _bars, "across": _across, "points": _points}
    with pyplot.rc_context(STYLE):
        size = ((5.4 if across < 3 else 4.1) * across, max(3.2, 1.6 + 0.34 * rows) * down + 0.4)
        figure, grid = pyplot.subplots(down, across, figsize=size, squeeze=False)
        flat = list(grid.flat)
        for axes in flat[len(panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(flat, panels):
            kinds[panel.kind](axes, panel, looks)
            axes.set_title(textwrap.fill(panel.title, int(12 * size[0] / across)), loc="left", fontsize=9)
            axes.set(xlabel=panel.x, ylabel=panel.y)
            axes.grid(alpha=0.25, linewidth=0.6, axis={"bars": "y", "across": "x"}.get(panel.kind, "both"))
            axes.set_axisbelow(True)
            if panel.level is not None:
                (axes.axvline if panel.kind == "across" else axes.axhline)(panel.level, color="0.5", linestyle=DOTTED)
        _finish(figure, flat, title, about)
        yield figure
        pyplot.close(figure)


def _finish(figure: Any, flat: Seq[Any], title: str, about: str) -> None:
    """The title above all panels; one legend, and what the reader must know, below them."""
    handles = {n: h for axes in flat for h, n in zip(*axes.get_legend_handles_labels()) if n}
    width, height = figure.get_figwidth(), figure.get_figheight()
    labels = [textwrap.fill(name, int(11 * width)) for name in handles]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    columns = max(1, min(4, int(width / (0.6 + 0.07 * longest))))
    figure.tight_layout()
    if labels:
        look = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "ncol": columns, "frameon": False, "fontsize": 8}
        figure.legend(list(handles.values()), labels, **look)
    rows = ceil(sum(1 + label.count("\n") for label in labels) / columns)
    figure.text(0.012, 1.0, textwrap.fill(title, int(11 * width)), va="bottom", weight="bold", fontsize=10)
    note = textwrap.fill(about, int(19 * width))
    figure.text(0.012, -(0.2 + 0.2 * rows) / height, note, va="top", fontsize=6.5, color="0.35")


def _with_spread(s: Series) -> list[tuple[tuple[Any, float], tuple[float, float]]]:
    """Each point with the low and the high of its y."""
    return list(zip(s.points, s.spread or [(y, y) for _, y in s.points]))


def _ends(values: Seq[float], spread: Spread) -> list[list[float]] | None:
    """How far error bars reach below and above the values."""
    ends = [[v - low for v, (low, _) in zip(values, spread)], [high - v for v, (_, high) in zip(values, spread)]]
    return ends if spread else None


def _lines(axes: Any, panel: Panel, looks: Mapping[str, tuple[str, int]]) -> None:
    ticks = sorted({x for s in panel.series for x, _ in s.points if not s.limit})
    for s in panel.series:
        (colour, i), (x, y) = looks[s.label], ([p[0] for p in s.points], [p[1] for p in s.points])
        look: dict[str, Any] = {"color": colour, "label": s.label, "marker": MARKERS[i % len(MARKERS)], "markersize": 5}
        if s.published:
            look |= {"linestyle": "--", "markerfacecolor": "none"}
        if s.limit:
            look |= {"linestyle": DOTTED, "marker": "", "label": "", "linewidth": 1.4}
        axes.plot(x, y, **look)
        if s.spread:
            axes.fill_between(x, *zip(*s.spread), color=colour, alpha=0.13, linewidth=0)
    highest = [max(y, *high) for s in panel.series if not s.limit for (_, y), high in _with_spread(s)]
    top = 1.08 * max([*highest, panel.level or 0.0]) or 1.0
    if panel.diagonal and ticks:
        line = [ticks[0] * (top / ticks[0]) ** (i / 64) for i in range(65)]  # a curve where the axis is logarithmic
        axes.plot(line, line, color="0.6", linewidth=0.8, linestyle=DOTTED)
    if ticks and ticks[-1] > 8 * max(ticks[0], 1):
        axes.set_xscale("log", base=2)
    if len(ticks) <= 12:
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
    axes.set_ylim(0, panel.top or top)
    if ticks:  # not as far as a diagonal reaches
        axes.set_xlim(ticks[0] / 1.1, 1.1 * ticks[-1])


def _bars(axes: Any, panel: Panel, looks: Mapping[str, tuple[str, int]]) -> None:
    names = list(dict.fromkeys(x for s in panel.series for x, _ in s.points))
    beside = 1 if panel.stacked else max(1, len(panel.series))
    width, below = 0.8 / beside, dict.fromkeys(names, 0.0)
    for n, s in enumerate(panel.series):
        shift = 0.0 if panel.stacked else (n - (beside - 1) / 2) * width
        place = [names.index(x) + shift for x, _ in s.points]
        look: dict[str, Any] = {"color": looks[s.label][0]}
        if s.published:
            look = {"color": "none", "edgecolor": looks[s.label][0], "hatch": "///", "linewidth": 0.8}
        if panel.stacked:
            look["bottom"] = [below[x] for x, _ in s.points]
            below |= {x: below[x] + y for x, y in s.points}
        if not panel.stacked:
            look["yerr"] = _ends([y for _, y in s.points], s.spread)
            look["error_kw"] = {"elinewidth": 0.8, "ecolor": "0.15"}
        axes.bar(place, [y for _, y in s.points], width, label=s.label, **look)
    if panel.top is not None:
        axes.set_ylim(0, panel.top)
    if len(names) < 3:  # no bar as wide as the panel
        axes.set_xlim(-1, len(names))
    texts = [textwrap.fill(str(n), 24) for n in names]
    turned = sum(max(len(line) for line in text.split("\n")) for text in texts) > 36
    axes.set_xticks(range(len(names)), texts, rotation=35 if turned else 0, fontsize=8)
    for text in axes.get_xticklabels() if turned else ():
        text.set(ha="right", rotation_mode="anchor")


def _across(axes: Any, panel: Panel, looks: Mapping[str, tuple[str, int]]) -> None:
    """Bars that lie, with intervals and values: one group a name, one bar a series."""
    names = list(dict.fromkeys(x for s in panel.series for x, _ in s.points))
    beside = 1 if panel.stacked else max(1, len(panel.series))
    step, start = 0.8 / beside, panel.level or 0.0
    for n, s in enumerate(panel.series):
        for (name, value), (low, high) in _with_spread(s):
            y = names.index(name) - 0.4 + step * (n % beside + 0.5)
            axes.barh(y, value - start, 0.9 * step, left=start, color=looks[s.label][0], label=s.label, alpha=0.85)
            axes.plot([low, high], [y, y], color="0.15", linewidth=1.1, marker="|" if low < high else "", markersize=5)
            axes.text(max(value, high), y, f"  {value:{panel.form}}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), [textwrap.fill(str(name), 28) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, panel.top) if panel.top else axes.margins(x=0.22)


def _points(axes: Any, panel: Panel, looks: Mapping[str, tuple[str, int]]) -> None:
    for n, s in enumerate(panel.series):
        x, y = [p[0] for p in s.points], [p[1] for p in s.points]
        look = {"color": looks[s.label][0], "fmt": MARKERS[n % len(MARKERS)], "markersize": 5, "elinewidth": 0.7}
        axes.errorbar(x, y, xerr=_ends(x, s.spread_x), yerr=_ends(y, s.spread), label=s.label, **look)
        for name, place in zip(s.names, s.points):
            axes.annotate(name, place, (5, -8), textcoords="offset points", fontsize=6)
    if panel.diagonal:
        top = 1.1 * max((v for s in panel.series for p in s.points for v in p), default=1.0)
        axes.plot([0, top], [0, top], color="0.6", linewidth=0.8)
