"""`sameseed profile`: the cost of one pass over M rows in each number format, beside this machine's limits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sameseed.cli import EXIT_INTERRUPTED
from sameseed.cli.console import check_outputs, keep, note, show_table, stages, warn_if_busy
from sameseed.cli.flags import ProfileArgs
from sameseed.cli.options import Parsed, numbers, words
from sameseed.measure.profile_report import LEGEND, plot, tables
from sameseed.measure.profiler import profile
from sameseed.measure.shapes import NAMES, get_shape
from sameseed.report import table as layout
from sameseed.store import replacing

RECORDS = Path("benchmarks/results/profile.jsonl")
SAME = ("kv_format", "prefill_tokens", "threads", "backend", "device", "repeats", "seconds", "draft")  # passed on as is


def run(parsed: Parsed[ProfileArgs]) -> int:
    """Check, measure, write; exit code 130 where Ctrl-C ended the measurement."""
    args = parsed.args
    if args.list:
        _list()
        return 0
    grid = {
        "formats": words(args.formats),
        "rows": numbers("rows", args.rows),
        "contexts": numbers("context", args.context),
        "batch_sizes": numbers("batch-sizes", args.batch_sizes),
        "draft_formats": words(args.draft_formats),
        **{name: getattr(args, name) for name in SAME},
    }
    to_stdout = str(args.json) == "-"
    record_file, file = RECORDS if args.record else None, None if to_stdout else args.json
    check_outputs((record_file, "--record in another folder"), (file, "--json"), plot=args.plot)
    warn_if_busy()
    title = args.shape or args.model or ""
    with stages(title, to_stdout) as tick:
        # In thousandths of the total, because weights and seconds share one bar.
        found = profile(
            args.shape,
            model=args.model,
            report=lambda stage, done, total: tick(f"{title}: {stage}", int(1000 * done / total), 1000),
            **grid,
        )
    keep([found.as_dict()], record_file, to_stdout, *tables(found))
    if file is not None:
        with replacing(file) as stream:
            stream.write((json.dumps(found.as_dict(), indent=1) + "\n").encode())
    if not to_stdout:
        note(LEGEND)
    if any((x.bandwidth_share or 0) > 1 for x in found.stored):
        said = "a read share above 100 %: other work ran while limits were measured; profile again when it is over"
        note(f"warning: {said}", style="yellow")
    pages = plot(found, args.plot) if args.plot is not None and found.costs else ()
    if written := [*filter(None, (record_file, file)), *pages]:
        note(f"written: {', '.join(map(str, written))}")
    if found.interrupted:
        print("interrupted; what was measured until then is kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _list() -> None:
    heads = ("name", "parameters", "layers", "hidden", "inner", "heads/KV", "vocabulary", "context")
    rows = []
    for name, c in ((name, get_shape(name)) for name in NAMES):
        size = f"{c.num_parameters / 1e9:.2f} B" if c.num_parameters >= 1e9 else f"{c.num_parameters / 1e6:.1f} M"
        shape = (c.num_layers, c.hidden_size, c.intermediate_size, f"{c.num_heads}/{c.num_kv_heads}")
        rows.append((name, size, *map(str, (*shape, c.vocab_size, c.max_model_len))))
    show_table(layout.table("shapes", heads, rows))
