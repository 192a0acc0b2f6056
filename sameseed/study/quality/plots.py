"""A comparison as two pictures, a page each: what a format costs in quality and acceptance, and what it buys."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import isfinite
from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError
from sameseed.study import record
from sameseed.study.plot import COLOURS, STYLE, save
from sameseed.study.quality.bootstrap import Interval
from sameseed.study.quality.compare import Comparison, Row
from sameseed.study.quality.speed import CHAIN


def plot_paths(path: Path) -> tuple[Path, Path]:
    """The pages that are written for `path`: NAME-quality.png and NAME-cost.png.

    Raises ConfigError for another suffix, or without matplotlib.
    """
    if path.suffix.lower() not in ("", ".png"):
        raise ConfigError(f"the pages are written as .png, not as {path.suffix!r}; name them e.g. {path.stem}.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("a plot needs matplotlib; install it with: pip install '.[eval]'") from None
    return path.with_name(f"{path.stem}-quality.png"), path.with_name(f"{path.stem}-cost.png")


def plot(found: Comparison, path: Path) -> tuple[Path, Path]:
    """Write both pages; returns their paths."""
    paths = plot_paths(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        for page, (title, draw) in zip(paths, (("quality", _quality), ("cost", _cost)), strict=True):
            height = 1.6 + 0.34 * len(found.rows)
            figure, panels = pyplot.subplots(2, 2, figsize=(11, 2 * height + 1.1))
            draw([panel for line in panels for panel in line], found)
            figure.suptitle(
                f"{title}: {found.baseline.label} and {len(found.rows) - 1} variants", x=0.012, ha="left", weight="bold"
            )
            figure.text(0.012, 0.012, _footnote(found), fontsize=7.5, color="0.35")
            figure.tight_layout(rect=(0, 0.035, 1, 0.97), h_pad=2.0, w_pad=2.0)
            save(figure, [page])
    return paths


Bar = tuple[float, Interval | None]


def _bars(
    panel: Any,
    found: Comparison,
    series: Seq[tuple[str, Seq[Bar | None]]],
    title: str,
    form: str,
    line: float | None = None,
) -> None:
    """Horizontal bars, a group for each variant and a bar for each series, with intervals and values.

    What is not finite (a format that overflows) has no place on an axis and is left out.
    """
    names = [row.label for row in found.rows]
    step = 0.8 / len(series)
    top = 0.0
    for s, (name, bars) in enumerate(series):
        shown = [(i, bar) for i, bar in enumerate(bars) if bar is not None and isfinite(bar[0])]
        for n, (i, bar) in enumerate(shown):
            y = i - 0.4 + step * (s + 0.5)
            label = name if n == 0 else None  # the legend names a series once
            panel.barh(y, bar[0], 0.9 * step, color=COLOURS[s], label=label, alpha=0.85)
            top = max(top, _whisker(panel, y, bar, form))
    if line is not None:
        panel.axvline(line, color="0.4", linewidth=0.8, linestyle="--")
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(0, top * 1.16 if top else 1)
    panel.grid(axis="x", alpha=0.25, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.set_title(title, loc="left", fontsize=10)
    if len(series) > 1:
        panel.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.1), ncols=len(series))


def _whisker(panel: Any, y: float, bar: Bar, form: str) -> float:
    """The interval of a bar at height y, and its value behind; returns how far both reach."""
    value, interval = bar
    end = value
    if interval is not None and all(map(isfinite, interval)):
        panel.plot(interval, [y, y], color="0.15", linewidth=1.1, marker="|", markersize=5)
        end = max(value, interval[1])
    panel.annotate(f"{value:{form}}", (end, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    return end


def _quality(panels: Seq[Any], found: Comparison) -> None:
    seed, rows = found.asked.settings.seed, found.rows
    _ratios(panels[0], found)
    tasks = [r.task for r in found.baseline.quality.results]
    if tasks:
        series = [
            (t, [(r.quality.results[i].value, r.quality.results[i].interval(seed)) for r in rows])
            for i, t in enumerate(tasks)
        ]
        title = "Share of questions answered right"
        _bars(panels[1], found, series, f"{title}: {tasks[0]}" if len(tasks) == 1 else title, ".1%")
    else:
        bits = [None if r.quality.perplexity is None else (r.quality.perplexity.bits_per_byte, None) for r in rows]
        _bars(panels[1], found, [("", bits)], "Bits a byte", ".4f")
    both = (("as target", [r.as_target for r in rows]), ("as draft of the baseline", [r.as_draft for r in rows]))
    rates = [(n, [None if a is None or a.rate is None else (a.rate, a.interval) for a in its]) for n, its in both]
    _bars(panels[2], found, rates, "Drafted tokens that are accepted", ".0%")
    lengths = [(n, [None if a is None or a.length is None else (a.length, None) for a in its]) for n, its in both]
    _bars(panels[3], found, lengths, "Tokens that a draft yields (mean acceptance length)", ".2f")


def _ratios(panel: Any, found: Comparison) -> None:
    """Perplexity over the baseline's: points, since what counts is the distance from 1; none where it is not finite."""
    rows = [r for r in found.rows if r.ratio is not None or r is found.baseline]
    for i, row in enumerate(rows):
        value, interval = row.ratio or (1.0, (1.0, 1.0))
        if not isfinite(value):
            continue
        if all(map(isfinite, interval)):
            panel.plot(interval, [i, i], color=COLOURS[0], linewidth=2, alpha=0.6)
        panel.plot([value], [i], color=COLOURS[0], marker="o", linestyle="")
        panel.annotate(f"{value:.4f}", (value, i), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    panel.axvline(1.0, color="0.4", linewidth=0.8, linestyle="--")
    panel.set_yticks(range(len(rows)), [r.label for r in rows])
    panel.set_ylim(len(rows) - 0.5, -0.6)
    panel.margins(x=0.12)
    panel.grid(axis="x", alpha=0.25, linewidth=0.6)
    p = found.baseline.quality.perplexity
    of = "" if p is None else f" ({p.perplexity:.2f})"
    panel.set_title(f"Perplexity over the baseline's{of}", loc="left", fontsize=10)


def _cost(panels: Seq[Any], found: Comparison) -> None:
    rows = found.rows

    def one(pick: Any) -> list[Bar | None]:
        return [(pick(row), None) for row in rows]

    sizes = [
        ("weights", one(lambda r: r.speed.weight_bytes / 1e6)),
        ("checkpoint", one(lambda r: r.disk_bytes / 1e6)),
    ]
    _bars(panels[0], found, sizes, "Size in memory and on disk, MB", ".1f")
    _bars(panels[1], found, [("", one(lambda r: r.memory.added / 1e6))], "Memory added at the peak, MB", ".1f")
    speeds = [
        ("plain", one(lambda r: r.speed.tokens_per_s)),
        (f"with the draft ({found.draft})", one(lambda r: r.speed.drafted_tokens_per_s)),
    ]
    _bars(panels[2], found, speeds, "Tokens/s, one sequence", ".0f")
    title = f"c({CHAIN}): time of a pass over {CHAIN} tokens against one"
    _bars(panels[3], found, [("", one(lambda r: r.speed.c))], title, ".2f", line=1.0)


def _footnote(found: Comparison) -> str:
    row: Row = found.baseline
    p = row.quality.perplexity
    parts = [record.cpu_name(), f"{record.native_threads()} threads"]
    if p is not None:
        parts.append(f"{row.quality.text}: {p.tokens} tokens, window {p.window}, stride {p.stride}")
    parts += [f"{len(row.speed.plain[0].completions)} prompts", "bars: 95 % intervals", f"commit {record.commit()}"]
    return "  ·  ".join(parts)
