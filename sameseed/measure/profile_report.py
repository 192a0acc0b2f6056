"""Tables of a profile, and its plot: cost curves beside the lower bound that the machine's limits set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from sameseed.measure.costs import Cost, Profile, ShapeCosts
from sameseed.measure.limits import KINDS
from sameseed.report import table as layout
from sameseed.report.plot import Panel, Series, draw, lines, source

LEGEND = (
    "ms: median of one pass over M new tokens; c(M): against one token. read share: least time to read the "
    "bytes, over the time taken at M = 1. peak share: least time for the arithmetic, over the time taken."
)

UNITS = {"int8": "OPS", "fp32": "FLOPS", "bf16": "FLOPS"}


def tables(profile: Profile) -> Iterator[Table]:
    """Tables of the machine's limits, the cost curves, and the formats; the last two also for the draft."""
    yield limits_table(profile)
    for part in (profile, profile.draft):
        if part is not None:
            yield curve_table(part)
            yield format_table(part)


def limits_table(profile: Profile) -> Table:
    """The machine's limits, and the instruction or method that each was measured with."""
    limits = profile.limits
    title = f"machine: {profile.machine.get('cpu', '')}, {threads_text(profile.threads)}"
    table = layout.table(title, ("limit", "", "measured with"))
    how = "huge pages and prefetch" if limits.source == "native" else "torch"
    table.add_row("read", f"{limits.read / 1e9:.1f} GB/s", how)
    for kind in KINDS:
        how, rate = limits.instructions.get(kind, "this CPU has no instruction for it"), limits.best(kind)
        table.add_row(kind, "-" if rate is None else f"{rate / 1e9:.0f} G{UNITS[kind]}", how)
    return table


def curve_table(profile: ShapeCosts) -> Table:
    """One row per format and context: milliseconds and c for each M."""
    rows = sorted({x.rows for x in profile.costs})
    heads = ["format", "KV", "cached", *(f"M={m}" for m in rows)]
    title = f"{profile.shape['name']}: ms of a pass over M rows, and c(M)"
    table = layout.table(title, heads)
    for name in profile.formats:
        for context, points in profile.curves(name).items():
            found = {x.rows: f"{x.ms:.1f} [dim]({x.c:.2f})[/]" for x in points}
            table.add_row(name, points[0].kv_format, str(context), *(found.get(m, "-") for m in rows))
    return table


def format_table(profile: ShapeCosts) -> Table:
    """One row per format: sizes, shares of the machine's limits, prefill and batch decode."""
    sizes = sorted({x.batch_size for x in profile.batch})
    prompt = next((x.tokens for x in profile.prefill), None)
    heads = ["format", "weights", "read a token", "read share", "load peak"]
    heads += [f"prefill {prompt}", "peak share"] if prompt else []
    title = f"{profile.shape['name']}: formats; prefill and batch in tokens/s"
    table = layout.table(title, [*heads, *(f"batch {size}" for size in sizes)])
    prefill = {x.format: x for x in profile.prefill}
    batch = {(x.format, x.batch_size): x for x in profile.batch}
    for x in profile.stored:
        cells = [
            x.format,
            _size(x.bytes),
            _size(x.bytes_per_token),
            "-" if x.bandwidth_share is None else f"{x.bandwidth_share:.0%}",
            _size(x.load_peak_bytes),
        ]
        if prompt:
            one = prefill.get(x.format)
            cells += ["-", "-"] if one is None else [f"{one.tokens_per_s:.0f}", f"{one.peak_share:.0%} {x.peak}"]
        found = (batch.get((x.format, size)) for size in sizes)
        table.add_row(*cells, *("-" if b is None else f"{b.tokens_per_s:.1f}" for b in found))
    return table


def threads_text(number: int) -> str:
    """A number of threads in words."""
    return f"{number} thread{'s' * (number != 1)}"


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def plot(profile: Profile, path: Path) -> tuple[Path, Path]:
    """Plot a profile as PNG and SVG in the same folder; returns both paths."""
    x, first = "M: rows in one pass (a draft of M - 1 tokens)", "What checking a draft costs (dotted: c = M)"
    second = "Milliseconds (dotted: the least that the machine allows)"
    least = _series(profile, lambda p: max(p.memory_ms, p.compute_ms))
    took = _series(profile, lambda p: p.ms) + [replace(s, spread=(), limit=True) for s in least if len(s.points) > 1]
    panels = [
        # c = M: M rows cost as much as M passes over one row. Above this line, speculation cannot win.
        Panel(first, x, _series(profile, lambda p: p.c), y="c(M): time against one row", level=1.0, diagonal=True),
        Panel(second, x, took, y="milliseconds a pass"),
    ]
    where, limits = {"machine": profile.machine, "commit": profile.commit, "time": profile.date}, profile.limits
    known = [f"{kind} {rate / 1e12:.2f} T{UNITS[kind]}" for kind in KINDS if (rate := limits.best(kind)) is not None]
    more = "bands: 10th to 90th percentile", "interrupted" * profile.interrupted
    about = source(where, f"reads {limits.read / 1e9:.1f} GB/s", *known, *more)
    cached = " and ".join(map(str, sorted({x.context for x in profile.costs})))
    title = f"{profile.shape['name']}: {threads_text(profile.threads)}, {cached} tokens cached"
    return draw(panels, path, title, about)


def _series(profile: Profile, y: Callable[[Cost], float]) -> list[Series]:
    """Each format and context as a line, with a band from the 10th to the 90th percentile."""
    several = len({x.context for x in profile.costs}) > 1
    return lines(
        (f"{name}, {context} cached" if several else name, p.rows, y(p), [y(p) * p.p10 / p.ms, y(p) * p.p90 / p.ms])
        for name in profile.formats
        for context, points in profile.curves(name).items()
        for p in points
    )
