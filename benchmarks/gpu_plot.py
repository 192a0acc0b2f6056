"""The picture of a run of `make bench-gpu`: c(M), shares of the bandwidth by pass and by product, and speculation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.study.plot import COLOURS, MARKERS

Points = dict[str, list[tuple[int, float]]]


def series(lines: Seq[dict[str, Any]], kind: str, value: str, context: int | None, part: str = "costs") -> Points:
    """Points (rows, value) of each format, of one kind of pass."""
    found: Points = {}
    for x in lines:
        if x["part"] == part and x["kind"] == kind and context in (None, x["context"]) and x[value] is not None:
            found.setdefault(x["format"], []).append((x["rows"], x[value]))
    return found


def products(lines: Seq[dict[str, Any]], op: str) -> Points:
    """Shares of the bandwidth of one product by itself, by format and rows."""
    found: Points = {}
    for x in lines:
        if x["part"] == "micro" and x["op"] == op and x["read_share"] is not None:
            found.setdefault(x["format"], []).append((x["rows"], x["read_share"]))
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

    first = min((x["context"] for x in costs if x["kind"] == "chain"), default=None)
    panels = [
        (f"c(M), context {first}", series(lines, "chain", "c", first)),
        (f"c(M) without the host, context {first}", series(lines, "chain", "c", first, "device")),
        ("Decoding: share of the copy bandwidth", series(lines, "batch", "read_share", None)),
        ("The same without the host", series(lines, "batch", "read_share", None, "device")),
        ("gate_up by itself: share of the bandwidth", products(lines, "gate_up")),
        ("down by itself: share of the bandwidth", products(lines, "down")),
    ]
    figure, axes = pyplot.subplots(3, 2, figsize=(11, 11.5))
    for axis, (title, lines_of) in zip(axes.flat, panels):
        for i, (format, points) in enumerate(lines_of.items()):
            axis.plot(*zip(*points), label=format, color=COLOURS[i % 7], marker=MARKERS[i % 7])
        axis.set_xscale("log", base=2)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("sequences" if "Decoding" in title or "same" in title else "rows")
        axis.set_ylim(bottom=0)
        if lines_of:
            axis.legend(frameon=False, fontsize=8)
    gpu = costs[0]["machine"]["gpu"] if costs[0]["device"] != "cpu" else costs[0]["machine"]["cpu"]
    dry = ", dry run: toy sizes" if costs[0]["dry_run"] else ""
    figure.text(0.01, 0.005, f"{costs[0]['shape']}, {gpu}, {costs[0]['run']}{dry}", fontsize=7, color="0.4")
    figure.tight_layout(rect=(0, 0.015, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
