"""Tables of a profile for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from sameseed.measure.costs import Profile
from sameseed.report import table as layout

LEGEND = (
    "ms: median of one pass over M new tokens; c(M): against one token. read share: least time to read the "
    "bytes, over the time taken at M = 1. peak share: least time for the arithmetic, over the time taken."
)


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
    title = f"machine: {profile.machine.get('cpu', '')}, {profile.threads} threads"
    table = layout.table(title, ("limit", "", "measured with"))
    table.add_row(
        "read", f"{limits.read / 1e9:.1f} GB/s", "huge pages and prefetch" if limits.source == "native" else "torch"
    )
    for kind, rate, unit in (
        ("int8", limits.int8, "GOPS"),
        ("fp32", limits.fp32, "GFLOPS"),
        ("bf16", limits.bf16, "GFLOPS"),
    ):
        how = limits.instructions.get(kind, "this CPU has no instruction for it")
        table.add_row(kind, "-" if rate is None else f"{rate / 1e9:.0f} {unit}", how)
    return table


def curve_table(profile: Profile) -> Table:
    """One row per format and context: milliseconds and c for each M."""
    rows = sorted({x.rows for x in profile.costs})
    heads = ["format", "KV", "cached", *(f"M={m}" for m in rows)]
    title = f"{profile.shape['name']}: ms of a pass over M rows, and c(M)"
    if profile.measured_layers:
        few, many = profile.measured_layers
        title += f"; extended from {few} and {many} of {profile.shape['num_layers']} layers"
    table = layout.table(title, heads)
    for name in profile.formats:
        for context in profile.contexts(name):
            found = {x.rows: x for x in profile.costs if x.format == name and x.context == context}
            kv_format = next(iter(found.values())).kv_format
            cells = [f"{found[m].ms:.1f} [dim]({found[m].c:.2f})[/]" if m in found else "-" for m in rows]
            table.add_row(name, kv_format, str(context), *cells)
    return table


def format_table(profile: Profile) -> Table:
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


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
