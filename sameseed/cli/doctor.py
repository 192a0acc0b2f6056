"""`sameseed doctor`: why does speculation not pay here? Watches a server's /metrics, or reads a saved page."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from sameseed.plan.doctor import Diagnosis


@dataclass(frozen=True)
class DoctorArgs:
    """Say why speculation does not pay, and which flags to set, for sameseed, vLLM or llama-server.

    It only reads metrics: keep the server under its usual load meanwhile. The tokens that a round needs to pay follow
    from --cost, or from --plain-tokens-per-s; without both they are a bound, if the server reports the models' times.
    """

    source: Annotated[str, Positional]  # a server's URL, or a file with its /metrics
    seconds: float = 10.0  # seconds from the first reading of a server's metrics to the last
    plain_tokens_per_s: Annotated[float | None, option("X")] = None  # of plain decoding, all clients together, if known
    cost: Annotated[Path | None, option("FILE")] = None  # file of `sameseed profile --json`
    api_key_file: Annotated[Path | None, option("FILE")] = None  # the server's key, on its first line
    json: Annotated[bool, option()] = False  # one JSON object instead of text


def run(argv: Seq[str], prog: str) -> int:
    """Parse, read, diagnose, print; exit code 0 whatever is found."""
    args = parse(DoctorArgs, argv, prog).args
    if not 0 < args.seconds <= 3600:
        raise ConfigError(f"--seconds must lie above 0, at most 3600, got {args.seconds:g}")
    if args.plain_tokens_per_s is not None and not args.plain_tokens_per_s > 0:
        raise ConfigError(f"--plain-tokens-per-s must be above 0, got {args.plain_tokens_per_s:g}")
    from sameseed.plan.doctor import diagnose, read_costs
    from sameseed.plan.metrics import fetch, read_file, watch

    costs = None if args.cost is None else read_costs(args.cost)
    if args.source.startswith(("http://", "https://")):
        from sameseed.cli.bench_serve import read_key

        counted = watch(partial(fetch, args.source, key=read_key(args.api_key_file)), args.seconds, args.source)
    else:
        counted = read_file(Path(args.source))
    found = diagnose(counted, costs, args.plain_tokens_per_s)
    if args.json:
        print(json.dumps(asdict(found)))
        return 0
    from sameseed.cli.console import show_table, stdout_console

    console = stdout_console()
    if found.have is not None:
        show_table(_figures(found))
    say = partial(console.print, markup=False, soft_wrap=True)
    say(found.verdict, style="bold")
    for fault in found.faults:
        say(f"* {fault.name}" if fault.says[1:] in found.verdict else f"* {fault.name}: {fault.says}")
        for flag in fault.flags:
            say(f"    {flag}", style="dim")
    return 0


def _figures(found: Diagnosis) -> Table:
    """What was measured, as a table."""
    from sameseed.report import table as layout

    table = layout.table(f"rounds of {found.engine}", ("figure", "value"))
    alone = ", if one at a time" if found.batch is None else ""  # the engine does not tell how many run at once
    rows = (
        ("tokens a round: you have", found.have, "{:.2f}"),
        (f"tokens a round: you need{' at least' * (found.need_is == 'bound')}{alone}", found.need, "{:.2f}"),
        ("draft tokens a round", found.k, "{:.1f}"),
        ("accepted", found.acceptance, "{:.0%}"),
        ("sequences at once", found.batch, "{:.1f}"),
        ("tokens of a prompt", found.prompt_tokens, "{:.0f}"),
        ("a round takes", found.round_ms, "{:.1f} ms"),
        ("drafting", found.draft_share, "{:.0%} of it"),
        (f"times plain decoding{', at most' * (found.need_is == 'bound')}{alone}", found.speedup, "{:.2f}"),
        (f"best length here{alone}", found.best_k, "{}"),
    )
    for name, value, form in rows:
        if value is not None:
            table.add_row(name, form.format(value))
    if found.survival:
        table.add_row("right at each place", " ".join(f"{s:.0%}" for s in found.survival))
    if found.by_batch:
        table.add_row("best by sequences", ", ".join(f"from {b}: {k or 'off'}" for b, k in found.by_batch))
    return table
