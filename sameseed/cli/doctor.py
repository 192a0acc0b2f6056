"""`sameseed doctor`: why does speculation not pay here? Watches a server's /metrics, or reads a saved page."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.table import Table

from sameseed.cli.console import show_table, stdout_console
from sameseed.cli.flags import DoctorArgs
from sameseed.cli.options import Parsed
from sameseed.plan.doctor import Diagnosis, diagnose, read_costs
from sameseed.plan.metrics import fetch, read_file, watch
from sameseed.report import table as layout
from sameseed.server.config import read_keys


def run(parsed: Parsed[DoctorArgs]) -> int:
    """Read, diagnose, print; exit code 0 whatever is found."""
    args = parsed.args
    costs = None if args.cost is None else read_costs(args.cost)
    if args.source.startswith(("http://", "https://")):
        key = next(iter(read_keys(args.api_key_file, "")), None)
        counted = watch(partial(fetch, args.source, key=key), args.seconds, args.source)
    else:
        counted = read_file(Path(args.source))
    found = diagnose(counted, costs, args.plain_tokens_per_s)
    if args.json:
        print(json.dumps(asdict(found)))
        return 0
    if found.have is not None:
        show_table(_figures(found))
    say = partial(stdout_console().print, markup=False, soft_wrap=True)
    say(found.verdict, style="bold")
    for fault in found.faults:
        say(f"* {fault.name}" if fault.says[1:] in found.verdict else f"* {fault.name}: {fault.says}")
        for flag in fault.flags:
            say(f"    {flag}", style="dim")
    return 0


def _figures(found: Diagnosis) -> Table:
    bound = " at least" * (found.need_is == "bound"), ", at most" * (found.need_is == "bound")
    alone = ", if one at a time" if found.batch is None else ""  # the engine does not tell how many run at once
    rows = (
        ("tokens a drafted round: you have", found.have, "{:.2f}"),
        (f"tokens a drafted round: you need{bound[0]}{alone}", found.need, "{:.2f}"),
        ("draft tokens a round", found.k, "{:.1f}"),
        ("accepted", found.acceptance, "{:.0%}"),
        ("sequences at once", found.batch, "{:.1f}"),
        ("tokens of a prompt", found.prompt_tokens, "{:.0f}"),
        ("a round takes", found.round_ms, "{:.1f} ms"),
        ("drafting", found.draft_share, "{:.0%} of it"),
        (f"times plain decoding{bound[1]}{alone}", found.speedup, "{:.2f}"),
        (f"best length here{alone}", found.best_k, "{}"),
        ("right at each place", " ".join(f"{s:.0%}" for s in found.survival) or None, "{}"),
        ("best by sequences", ", ".join(f"from {b}: {k or 'off'}" for b, k in found.by_batch or ()) or None, "{}"),
    )
    shown = [(name, form.format(value)) for name, value, form in rows if value is not None]
    return layout.table(f"rounds of {found.engine}", ("figure", "value"), shown)
