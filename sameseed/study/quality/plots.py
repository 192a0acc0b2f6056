"""Plots of a comparison on two pages: quality and acceptance of each variant, and its size and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.study.plot import COLOURS, STYLE, plot_paths, save
from sameseed.study.quality.speed import CHAIN
from sameseed.study.quality.tables import Figure, Record, figures

Panel = tuple[str, Mapping[str, str], float]  # title; figure names by legend label; value at which bars begin
RATIO: Panel = ("Perplexity over the baseline's", {"": "  over the baseline's"}, 1.0)
BITS: Panel = ("Bits a byte", {"": "bits a byte"}, 0.0)
ACCEPTANCE: tuple[Panel, ...] = (
    (
        "Drafted tokens that are accepted",
        {"as target": "accepted as target", "as draft of the baseline": "accepted as draft"},
        0.0,
    ),
    (
        "Tokens a draft yields (mean acceptance length)",
        {"as target": "  per draft as target", "as draft of the baseline": "  per draft as draft"},
        0.0,
    ),
)
COST: tuple[Panel, ...] = (
    ("Size in memory and on disk, MB", {"weights": "weights MB", "checkpoint": "checkpoint MB"}, 0.0),
    ("Memory added at the peak, MB", {"": "memory added MB"}, 0.0),
    ("Tokens/s, one sequence", {"plain": "tokens/s", "with the draft": "tokens/s drafted for"}, 0.0),
    (f"c({CHAIN}): time of a pass over {CHAIN} tokens against one", {"": f"c({CHAIN})"}, 1.0),
)


def page_paths(path: Path) -> list[Path]:
    """Paths of the pages for `path`: NAME-quality and NAME-cost, each as .png and .svg. Raises ConfigError."""
    return [p for page in ("quality", "cost") for p in plot_paths(path.with_stem(f"{path.stem}-{page}"))]


def plot(records: Seq[Record], path: Path) -> list[Path]:
    """Plot a comparison's records on both pages; returns the paths of the files."""
    paths = page_paths(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first, found = records[0], [figures(r) for r in records]
    p, c, machine = first["perplexity"], first["config"], first["machine"]
    about = [machine["cpu"], f"{machine['threads']} threads"]
    if p is not None:
        about.append(f"{p['text']}: {p['tokens']} tokens, window {p['window']}, stride {p['stride']}")
    about += [f"{c['num_prompts']} prompts", "lines: 95 % intervals", f"commit {first['commit']}"]
    tasks: Panel = ("Share of questions answered right", {t["task"]: t["task"] for t in first["tasks"]}, 0.0)
    pages = {"quality": (RATIO, tasks if first["tasks"] else BITS, *ACCEPTANCE), "cost": COST}
    with pyplot.rc_context(STYLE):
        for i, (page, panels) in enumerate(pages.items()):
            figure, grid = pyplot.subplots(2, 2, figsize=(11, 4.3 + 0.68 * len(found)))
            for panel, (title, series, start) in zip(grid.flat, panels, strict=True):
                _bars(panel, found, series, start)
                panel.set_title(title, loc="left", fontsize=10)
                panel.set_yticks(range(len(found)), [r["config"]["label"] for r in records])
            title = f"{page}: {c['label']} and {len(found) - 1} variants; draft: {c['draft']}"
            figure.suptitle(title, x=0.012, ha="left", weight="bold")
            figure.text(0.012, 0.012, "  ·  ".join(about), fontsize=7.5, color="0.35")
            figure.tight_layout(rect=(0, 0.035, 1, 0.97), h_pad=2.0, w_pad=2.0)
            save(figure, paths[2 * i : 2 * i + 2])
    return paths


def _bars(panel: Any, found: Seq[Mapping[str, Figure]], series: Mapping[str, str], start: float) -> None:
    """Horizontal bars with intervals and values: one group per variant, one bar per series."""
    step = 0.8 / len(series)
    for s, (name, wanted) in enumerate(series.items()):
        for i, its in enumerate(found):
            figure, y = its[wanted], i - 0.4 + step * (s + 0.5)
            if figure.value is None:
                continue
            panel.barh(y, figure.value - start, 0.9 * step, left=start, color=COLOURS[s], label=name, alpha=0.85)
            low, high = figure.interval or (figure.value, figure.value)
            panel.plot([low, high], [y, y], color="0.15", linewidth=1.1, marker="|" if low < high else "", markersize=5)
            text, end = f"{figure.value:{figure.form}}", max(figure.value, high)
            panel.annotate(text, (end, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    if start:
        panel.axvline(start, color="0.4", linewidth=0.8, linestyle="--")
    panel.set_ylim(len(found) - 0.5, -0.5)
    panel.margins(x=0.16)
    panel.grid(axis="x", alpha=0.25, linewidth=0.6)
    panel.set_axisbelow(True)
    if any(series):
        handles = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))  # each series once
        place = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.1), "ncols": len(series)}
        panel.legend(handles.values(), handles, frameon=False, fontsize=8, **place)
