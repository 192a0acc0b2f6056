"""Plots of a comparison on two pages: quality and acceptance of each variant, and its size and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path

from sameseed.measure.quality.speed import CHAIN
from sameseed.measure.quality.tables import Figure, Record, figures
from sameseed.report.plot import Panel, Series, draw, origin, plot_paths

Bars = tuple[str, Mapping[str, str], float | None]  # title; figure names by legend label; value at which bars begin
RATIO: Bars = ("Perplexity over the baseline's", {"": "  over the baseline's"}, 1.0)
BITS: Bars = ("Bits a byte", {"": "bits a byte"}, None)
ACCEPTANCE: tuple[Bars, ...] = (
    (
        "Drafted tokens that are accepted",
        {"as target": "accepted as target", "as draft of the baseline": "accepted as draft"},
        None,
    ),
    (
        "Tokens a draft yields (mean acceptance length)",
        {"as target": "  per draft as target", "as draft of the baseline": "  per draft as draft"},
        None,
    ),
)
COST: tuple[Bars, ...] = (
    ("Size in memory and on disk, MB", {"weights": "weights MB", "checkpoint": "checkpoint MB"}, None),
    ("Memory added at the peak, MB", {"": "memory added MB"}, None),
    ("Tokens/s, one sequence", {"plain": "tokens/s", "with the draft": "tokens/s drafted for"}, None),
    (f"c({CHAIN}): time of a pass over {CHAIN} tokens against one", {"": f"c({CHAIN})"}, 1.0),
)


def page_paths(path: Path) -> list[Path]:
    """Paths of the pages for `path`: NAME-quality and NAME-cost, each as .png and .svg. Raises ConfigError."""
    return [p for page in ("quality", "cost") for p in plot_paths(path.with_stem(f"{path.stem}-{page}"))]


def plot(records: Seq[Record], path: Path) -> list[Path]:
    """Plot a comparison's records on both pages; returns the paths of the files."""
    first, each = records[0], {str(r["config"]["label"]): figures(r) for r in records}
    p, c = first["perplexity"], first["config"]
    about = [f"{p['text']}: {p['tokens']} tokens, window {p['window']}, stride {p['stride']}"] if p is not None else []
    note = origin(first, *about, f"{c['num_prompts']} prompts", "lines: 95 % intervals")
    tasks: Bars = ("Share of questions answered right", {t["task"]: t["task"] for t in first["tasks"]}, None)
    pages = {"quality": (RATIO, tasks if first["tasks"] else BITS, *ACCEPTANCE), "cost": COST}
    paths: list[Path] = []
    for page, bars in pages.items():
        title = f"{page}: {c['label']} and {len(each) - 1} variants; draft: {c['draft']}"
        panels = [_panel(each, *b) for b in bars]
        paths += draw(panels, path.with_stem(f"{path.stem}-{page}"), title, note, columns=2)
    return paths


def _panel(
    each: Mapping[str, Mapping[str, Figure]], title: str, shown: Mapping[str, str], start: float | None
) -> Panel:
    series, form = [], ""
    for label, name in shown.items():
        values = {variant: its[name] for variant, its in each.items() if its[name].value is not None}
        form = next((f.form for f in values.values()), form)
        points = [(variant, f.value) for variant, f in values.items() if f.value is not None]
        spread = [(low, high) for f in values.values() for low, high in [f.interval or (f.value, f.value)]]
        series.append(Series(label, points, spread=spread))  # type: ignore[arg-type]  # values without one are left out
    return Panel(title, "", series, "across", level=start, form=form)
