"""Plots of cost curves: c(M), and milliseconds beside the lower bound that the machine's limits set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError
from sameseed.study.costs import Cost, Profile
from sameseed.study.record import require
from sameseed.study.report import title

# Colours that colour-blind readers can tell apart (after Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "--", "-.", (0, (8, 2)))  # contexts
LIMIT = (0, (1, 1.4))  # dotted
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.hashsalt": "sameseed",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
SUFFIXES = (".png", ".svg")


def plot_paths(path: Path) -> tuple[Path, Path]:
    """Paths of the PNG and the SVG for `path`. Raises ConfigError for another suffix, or without matplotlib."""
    if path.suffix.lower() not in ("", *SUFFIXES):
        raise ConfigError(f"a plot is written as .png and .svg, not as {path.suffix!r}; name it e.g. {path.stem}.png")
    require("a plot", "study", "matplotlib")
    png, svg = (path.with_suffix(suffix) for suffix in SUFFIXES)
    return png, svg


def plot(profile: Profile, path: Path) -> tuple[Path, Path]:
    """Plot a profile as PNG and SVG in the same folder; returns both paths."""
    paths = plot_paths(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6))
        _c_panel(left, profile)
        _ms_panel(right, profile)
        cached = " and ".join(map(str, sorted({x.context for x in profile.costs})))
        title = f"{profile.shape['name']}: {profile.threads} threads, {cached} tokens cached"
        figure.text(0.012, 0.945, title, fontsize=12, weight="bold")
        figure.text(0.012, 0.02, _footnote(profile), fontsize=7.5, color="0.35")
        figure.subplots_adjust(left=0.055, right=0.82, bottom=0.175, top=0.85, wspace=0.19)
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.825, 0.86), frameon=False)
        save(figure, paths)
    return paths


def plot_speedups(records: Seq[Mapping[str, Any]], path: Path) -> tuple[Path, Path]:
    """Plot benchmark records: speed-up by draft length, one panel per workload and one line per draft.

    Returns the paths of the PNG and the SVG.
    """
    paths = plot_paths(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for record in records:
        config = record["config"]
        lines = panels.setdefault(title(config), {})
        if config["draft"] != "none":
            name = config["label"].replace(f" k={config['num_draft_tokens']}", "")
            lines.setdefault(name, []).append((config["num_draft_tokens"], record["speedup"]))
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(len(panels), 1, figsize=(8, 3.4 * len(panels)), squeeze=False)
        for panel, (name, lines) in zip(axes[:, 0], panels.items(), strict=True):
            for draft, points in lines.items():
                i = names.index(draft)
                look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
                panel.plot(*zip(*sorted(points), strict=True), label=draft, **look)
            panel.axhline(1.0, color="0.5", linestyle=LIMIT)
            panel.set_xticks(sorted({k for points in lines.values() for k, _ in points}))
            panel.set(xlabel="draft tokens", ylabel="times plain decoding")
            panel.set_title(name, fontsize=9, loc="left")
            panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
        figure.tight_layout()
        save(figure, paths)
    return paths


def save(figure: Any, paths: Seq[Path]) -> None:
    """Write a figure to each path, without a date in an SVG's metadata, and close it."""
    from matplotlib import pyplot

    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _curves(profile: Profile) -> list[tuple[str, int, int, int, list[Cost]]]:
    """Each curve as (format, index of the format, context, index of the context, points in order of rows)."""
    found = []
    for i, name in enumerate(profile.formats):
        for j, context in enumerate(profile.contexts(name)):
            points = [x for x in profile.costs if x.format == name and x.context == context]
            found.append((name, i, context, j, sorted(points, key=lambda x: x.rows)))
    return found


def _draw(panel: Any, profile: Profile, y: Callable[[Cost], float]) -> None:
    several = len({x.context for x in profile.costs}) > 1
    for name, i, context, j, points in _curves(profile):
        rows = [p.rows for p in points]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        label = f"{name}, {context} cached" if several else name
        line = {"color": colour, "linestyle": STYLES[j % len(STYLES)], "marker": marker, "markersize": 5}
        panel.plot(rows, [y(p) for p in points], label=label, **line)
        if j == 0:  # bands for the first context only, since more bands would hide the lines
            low, high = ([y(p) * getattr(p, q) / p.ms for p in points] for q in ("p10", "p90"))
            panel.fill_between(rows, low, high, color=colour, alpha=0.13, linewidth=0)


def _row_axis(panel: Any, profile: Profile) -> None:
    rows = sorted({x.rows for x in profile.costs})
    panel.set_xscale("log", base=2)
    panel.set_xticks(rows, [str(r) for r in rows])
    panel.minorticks_off()
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.set_xlabel("M: rows in one pass (1 = plain decoding, M = a draft of M - 1 tokens)")


def _c_panel(panel: Any, profile: Profile) -> None:
    _draw(panel, profile, lambda p: p.c)
    rows = sorted({x.rows for x in profile.costs})
    top = max(1.15 * max((x.c for x in profile.costs), default=1.0), 1.6)
    panel.axhline(1.0, color="0.5", linewidth=0.8)
    # c = M: M rows cost as much as M passes over one row. Above this line, speculation cannot win.
    fine = [m for m in _fine(rows) if m <= top]
    panel.plot(fine, fine, color="0.6", linewidth=0.8, linestyle=LIMIT)
    if fine[-1] > 1:
        panel.annotate("c = M", (fine[-1], fine[-1]), (4, -6), textcoords="offset points", color="0.4", fontsize=8)
    panel.set_ylim(0, top)
    _row_axis(panel, profile)
    panel.set_ylabel("c(M): time against one row")
    panel.set_title("What checking a draft costs", loc="left")


def _ms_panel(panel: Any, profile: Profile) -> None:
    _draw(panel, profile, lambda p: p.ms)
    for _, i, _, j, points in _curves(profile):
        if j:
            continue  # only the limit of the first context is drawn
        first, last = points[0], points[-1]
        fine = _fine([p.rows for p in points])
        limit = [max(_line(first, last, "memory_ms", m), _line(first, last, "compute_ms", m)) for m in fine]
        panel.plot(fine, limit, color=COLOURS[i % len(COLOURS)], linewidth=1.4, linestyle=LIMIT)
    text = "limit of the machine:\nmax(bytes / bandwidth,\nM x operations / peak)"
    panel.plot([], [], color="0.35", linewidth=1.4, linestyle=LIMIT, label=text)
    _row_axis(panel, profile)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("milliseconds a pass")
    panel.set_title("Milliseconds, and the least that the machine allows", loc="left")


def _fine(rows: Seq[int]) -> list[float]:
    """Intermediate values of M, so that a straight line in M is drawn as a curve on the logarithmic axis."""
    steps = 64
    return [rows[0] * (rows[-1] / rows[0]) ** (i / steps) for i in range(steps + 1)]


def _line(first: Cost, last: Cost, name: str, rows: float) -> float:
    a, b = float(getattr(first, name)), float(getattr(last, name))
    share = (rows - first.rows) / (last.rows - first.rows) if last.rows > first.rows else 0.0
    return a + share * (b - a)


def _footnote(profile: Profile) -> str:
    limits = profile.limits
    parts = [str(profile.machine.get("cpu", "")), f"reads {limits.read / 1e9:.1f} GB/s"]
    for kind, value, unit in (
        ("int8", limits.int8, "TOPS"),
        ("fp32", limits.fp32, "TFLOPS"),
        ("bf16", limits.bf16, "TFLOPS"),
    ):
        if value is not None:
            parts.append(f"{kind} {value / 1e12:.2f} {unit}")
    parts += [f"commit {profile.commit}", profile.date[:10], "bands: 10th to 90th percentile"]
    if profile.interrupted:
        parts.append("interrupted")
    return "  ·  ".join(p for p in parts if p)
