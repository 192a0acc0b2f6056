"""`sameseed profile`: the cost of one pass over M rows in each number format, beside this machine's limits."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sameseed.cli import EXIT_INTERRUPTED
from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from sameseed.measure.costs import Profile

RECORDS = Path("benchmarks/results/profile.jsonl")
SAME = ("kv_format", "prefill_tokens", "threads", "backend", "device", "repeats", "seconds", "draft")  # passed on as is


@dataclass(frozen=True)
class ProfileArgs:
    """Measure c(M), the time of a pass over M new tokens relative to one token, in number formats that are interleaved.

    Also prefill and batch decoding, memory, and the shares of the machine's limits that were reached. Ctrl-C ends the
    measurement and keeps what was measured.
    """

    shape: Annotated[str | None, option("NAME")] = None  # a known shape, with random weights (see --list)
    model: Annotated[str | None, option("PATH")] = None  # or a checkpoint: a folder, or a hub id
    formats: str = "bf16"  # number formats of the weights, e.g. w4a8,w8a8,bf16
    rows: str = "1,2,4,8,16"  # M, ascending, at most 65; 1 is always measured
    context: str = "256"  # cached tokens before the new ones, e.g. 256,2048,8192
    kv_format: str = "auto"  # number format of the KV cache; auto follows the weights
    prefill_tokens: int = 512  # length of the prompt that is read in one pass; 0: none
    batch_sizes: str = "4,16"  # sequences that decode together; empty: none
    threads: Annotated[int | None, option("N")] = None  # CPU threads; unset: as many as the backend finds useful
    backend: str = "auto"  # kernels: cpu, reference, ...; auto takes the fastest that runs here
    device: str = "cpu"  # cpu, cuda, cuda:1, ...
    repeats: int = 30  # the most runs of each pass; at least 3 are made
    seconds: float = 60.0  # time budget for all passes, repeats included
    draft: Annotated[str | None, option("NAME")] = None  # a draft model's shape or folder, measured too
    draft_formats: str = "auto"  # number formats of the draft's weights
    json: Annotated[Path | None, option("FILE")] = None  # write the profile there; - is standard output, without tables
    plot: Annotated[Path | None, option("FILE.png")] = None  # draw the curves, as PNG and as SVG beside it
    record: Annotated[bool, option()] = False  # append the profile to benchmarks/results/profile.jsonl
    list: Annotated[bool, option()] = False  # list the known shapes and end


def run(argv: Seq[str], prog: str) -> int:
    """Check, measure, write; exit code 130 where Ctrl-C ended the measurement."""
    args = parse(ProfileArgs, argv, prog).args
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
    from sameseed.cli.console import check_outputs, warn_if_busy

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
    from sameseed.cli.console import progress
    from sameseed.measure.profiler import profile

    quiet = str(args.json) == "-"
    title = args.shape or args.model or ""
    with progress(title, quiet) as bar:
        task = bar.tasks[0].id

        def report(stage: str, done: float, total: float) -> None:
            # In thousandths of the total, because weights and seconds share one bar.
            bar.update(task, description=f"{title}: {stage}", completed=int(1000 * done / total), total=1000)

        return profile(args.shape, model=args.model, report=report, **grid)


def _write(args: ProfileArgs, found: Profile) -> None:
    from sameseed.cli.console import show_table, stderr_console
    from sameseed.measure.profile_report import LEGEND, tables
    from sameseed.report import record
    from sameseed.store import replacing

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
        from sameseed.measure.profile_report import plot

        written += plot(found, args.plot)
    if written:
        stderr_console().print(f"written: {', '.join(map(str, written))}", style="dim")


def _list() -> None:
    from sameseed.cli.console import show_table
    from sameseed.measure.shapes import NAMES, get_shape
    from sameseed.report import table as layout

    heads = ("name", "parameters", "layers", "hidden", "inner", "heads/KV", "vocabulary", "context")
    table = layout.table("shapes", heads)
    for name in NAMES:
        c = get_shape(name)
        size = f"{c.num_parameters / 1e9:.2f} B" if c.num_parameters >= 1e9 else f"{c.num_parameters / 1e6:.1f} M"
        shape = (c.num_layers, c.hidden_size, c.intermediate_size, f"{c.num_heads}/{c.num_kv_heads}")
        table.add_row(name, size, *map(str, (*shape, c.vocab_size, c.max_model_len)))
    show_table(table)
