"""The picture of a run of `make bench-gpu`: c(M) by format, and the share of the memory's bandwidth by batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from foretoken.study.plot import COLOURS, MARKERS


def series(
    lines: Seq[dict[str, Any]], kind: str, value: str, context: int | None
) -> dict[str, list[tuple[int, float]]]:
    """Points (rows, value) of each format, of one kind of pass."""
    found: dict[str, list[tuple[int, float]]] = {}
    for x in lines:
        if x["part"] == "costs" and x["kind"] == kind and context in (None, x["context"]):
            found.setdefault(x["format"], []).append((x["rows"], x[value]))
    return found


def draw(lines: Seq[dict[str, Any]], path: Path) -> Path | None:
    """Write the picture; None without matplotlib, or without anything to show."""
    costs = [x for x in lines if x["part"] == "costs"]
    try:
        import matplotlib
    except ImportError:
        return None
    if not costs:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = min(x["context"] for x in costs if x["kind"] == "chain")
    panels = [
        (f"c(M): a pass of M rows over a pass of one, context {first}", "chain", "c", first),
        ("Share of the copy bandwidth, decoding", "batch", "read_share", None),
    ]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for axis, (title, kind, value, context) in zip(axes, panels):
        for i, (format, points) in enumerate(series(lines, kind, value, context).items()):
            axis.plot(*zip(*points), label=format, color=COLOURS[i % 7], marker=MARKERS[i % 7])
        axis.set_xscale("log", base=2)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("rows" if kind == "chain" else "sequences")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
    gpu = costs[0]["machine"]["gpu"] if costs[0]["device"] != "cpu" else costs[0]["machine"]["cpu"]
    dry = ", dry run: toy sizes" if costs[0]["dry_run"] else ""
    figure.text(0.01, 0.01, f"{costs[0]['shape']}, {gpu}, {costs[0]['run']}{dry}", fontsize=7, color="0.4")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
