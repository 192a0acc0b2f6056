"""`sameseed profile`: the cost of one pass over M rows in each number format, beside this machine's limits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sameseed.cli import EXIT_INTERRUPTED
from sameseed.cli.console import check_outputs, progress, show_table, stderr_console, warn_if_busy
from sameseed.cli.flags import ProfileArgs
from sameseed.cli.options import Parsed
from sameseed.errors import ConfigError
from sameseed.measure.costs import Profile
from sameseed.measure.profile_report import LEGEND, plot, tables
from sameseed.measure.profiler import profile
from sameseed.measure.shapes import NAMES, get_shape
from sameseed.report import record, table as layout
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
    record, file = RECORDS if args.record else None, None if str(args.json) == "-" else args.json
    check_outputs((record, "--record in another folder"), (file, "--json"), plot=args.plot)
    warn_if_busy()
    found = _measure(args, grid)
    _write(args, found)
    if found.interrupted:
        print("interrupted; what was measured until then is kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def words(text: str) -> tuple[str, ...]:
    """The words of a comma-separated list."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """The whole numbers of a comma-separated list, the value of --`flag`. Raises ConfigError."""
    try:
        return tuple(int(word) for word in words(text))
    except ValueError:
        raise ConfigError(f"--{flag} takes whole numbers with commas between, e.g. 1,2,4, got {text!r}") from None


def _measure(args: ProfileArgs, grid: dict[str, Any]) -> Profile:
    quiet = str(args.json) == "-"
    title = args.shape or args.model or ""
    with progress(title, quiet) as (update, _):

        def report(stage: str, done: float, total: float) -> None:
            # In thousandths of the total, because weights and seconds share one bar.
            update(description=f"{title}: {stage}", completed=int(1000 * done / total), total=1000)

        return profile(args.shape, model=args.model, report=report, **grid)


def _write(args: ProfileArgs, found: Profile) -> None:
    data = found.as_dict()
    written: list[Path] = []
    if args.record:
        record.append(RECORDS, data)
        written.append(RECORDS)
    if str(args.json) == "-":
        print(json.dumps(data))
    elif args.json is not None:
        with replacing(args.json) as file:
            file.write((json.dumps(data, indent=1) + "\n").encode())
        written.append(args.json)
    if str(args.json) != "-":
        for table in tables(found):
            show_table(table)
        stderr_console().print(LEGEND, style="dim")
    if any((x.bandwidth_share or 0) > 1 for x in found.stored):
        said = "a read share above 100 %: other work ran while limits were measured; profile again when it is over"
        stderr_console().print(f"warning: {said}", style="yellow")
    if args.plot is not None and found.costs:
        written += plot(found, args.plot)
    if written:
        stderr_console().print(f"written: {', '.join(map(str, written))}", style="dim")


def _list() -> None:
    heads = ("name", "parameters", "layers", "hidden", "inner", "heads/KV", "vocabulary", "context")
    table = layout.table("shapes", heads)
    for name in NAMES:
        c = get_shape(name)
        size = f"{c.num_parameters / 1e9:.2f} B" if c.num_parameters >= 1e9 else f"{c.num_parameters / 1e6:.1f} M"
        shape = (c.num_layers, c.hidden_size, c.intermediate_size, f"{c.num_heads}/{c.num_kv_heads}")
        table.add_row(name, size, *map(str, (*shape, c.vocab_size, c.max_model_len)))
    show_table(table)
