"""Plots of benchmark records, and of a profile's cost curves beside the lower bound that the machine's limits set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.measure.costs import Cost, Profile
from sameseed.measure.report import title
from sameseed.report.plot import Panel, Series, draw, origin

ROWS = "M: rows in one pass (a draft of M - 1 tokens)"
STEPS = 64  # points of a line that is straight in M, on a logarithmic axis


def plot_speedups(records: Seq[Mapping[str, Any]], path: Path) -> tuple[Path, Path]:
    """Plot benchmark records: speed-up by draft length, one panel per workload and one line per draft.

    Returns the paths of the PNG and the SVG. Bands: least to most of the runs.
    """
    workloads: dict[str, dict[str, list[tuple[int, float, tuple[float, float]]]]] = {}
    for record in records:
        config, ratios = record["config"], [r["speedup"] for r in record["repetitions"]]
        lines = workloads.setdefault(title(config), {})
        if config["draft"] != "none":
            name = config["label"].replace(f" k={config['num_draft_tokens']}", "")
            point = (config["num_draft_tokens"], record["speedup"], (min(ratios), max(ratios)))
            lines.setdefault(name, []).append(point)
    panels = []
    for name, lines in workloads.items():
        series = [
            Series(draft, [p[:2] for p in sorted(points)], spread=[p[2] for p in sorted(points)])
            for draft, points in lines.items()
        ]
        panels.append(Panel(name, "draft tokens", series, y="times plain decoding", level=1.0))
    runs = f"medians of {len(records[0]['repetitions'])} runs, bands: least to most"
    return draw(panels, path, about=origin(records[0], runs), columns=1)


def plot(profile: Profile, path: Path) -> tuple[Path, Path]:
    """Plot a profile as PNG and SVG in the same folder; returns both paths."""
    cached = " and ".join(map(str, sorted({x.context for x in profile.costs})))
    limits = [
        Series(label, [(m, _limit(points, m)) for m in _fine(points)], limit=True)
        for label, points in _curves(profile)
        if len(points) > 1
    ]
    panels = [
        # c = M: M rows cost as much as M passes over one row. Above this line, speculation cannot win.
        Panel(
            "What checking a draft costs (dotted: c = M)",
            ROWS,
            _series(profile, lambda p: p.c),
            y="c(M): time against one row",
            level=1.0,
            diagonal=True,
        ),
        Panel(
            "Milliseconds (dotted: the least that the machine allows)",
            ROWS,
            [*_series(profile, lambda p: p.ms), *limits],
            y="milliseconds a pass",
        ),
    ]
    source = {"machine": profile.machine, "commit": profile.commit, "time": profile.date}
    about = origin(source, *_limits(profile), "bands: 10th to 90th percentile", "interrupted" * profile.interrupted)
    return draw(panels, path, f"{profile.shape['name']}: {profile.threads} threads, {cached} tokens cached", about)


def _curves(profile: Profile) -> list[tuple[str, list[Cost]]]:
    """Each curve as its label and its points in order of rows."""
    several = len({x.context for x in profile.costs}) > 1
    curves = []
    for name in profile.formats:
        for context in profile.contexts(name):
            points = [x for x in profile.costs if x.format == name and x.context == context]
            label = f"{name}, {context} cached" if several else name
            curves.append((label, sorted(points, key=lambda x: x.rows)))
    return curves


def _series(profile: Profile, y: Callable[[Cost], float]) -> list[Series]:
    return [
        Series(
            label,
            [(p.rows, y(p)) for p in points],
            spread=[(y(p) * p.p10 / p.ms, y(p) * p.p90 / p.ms) for p in points],
        )
        for label, points in _curves(profile)
    ]


def _fine(points: Seq[Cost]) -> list[float]:
    first, last = points[0].rows, points[-1].rows
    return [first * (last / first) ** (i / STEPS) for i in range(STEPS + 1)]


def _limit(points: Seq[Cost], rows: float) -> float:
    """The least milliseconds that reading and arithmetic take, each straight in the number of rows."""
    first, last = points[0], points[-1]
    share = (rows - first.rows) / (last.rows - first.rows)
    memory = first.memory_ms + share * (last.memory_ms - first.memory_ms)
    return max(memory, first.compute_ms + share * (last.compute_ms - first.compute_ms))


def _limits(profile: Profile) -> list[str]:
    limits = profile.limits
    rates = (("int8", limits.int8, "TOPS"), ("fp32", limits.fp32, "TFLOPS"), ("bf16", limits.bf16, "TFLOPS"))
    known = [f"{kind} {rate / 1e12:.2f} {unit}" for kind, rate, unit in rates if rate is not None]
    return [f"reads {limits.read / 1e9:.1f} GB/s", *known]
