"""`sameseed verify-lossless --every`: certificates of all drafters, formats and batch sizes, and one table of them."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from sameseed.cli.options import EMBEDDED, EngineChoice, draft_choice
from sameseed.config import EngineConfig, SpecConfig
from sameseed.request import SamplingParams

if TYPE_CHECKING:
    from sameseed.cli.verify_lossless import VerifyArgs
    from sameseed.study.certificate import Asked
    from sameseed.study.certificate_every import Outcome

COLOURS = {"passed": "green", "these checks passed": "green", "failed": "bold red", "impossible": "yellow"}


def drafts_of(engine: EngineChoice) -> list[tuple[str, SpecConfig]]:
    """Every way to guess for a model: the embedded pair's, or those without a model, and the one that --draft names."""
    from sameseed.study import certificate_every as every

    own: SpecConfig | None = engine.settings["draft"]
    embedded = engine.model in EMBEDDED
    found = {}
    for name in every.EMBEDDED if embedded else every.MODELLESS:
        spec = draft_choice(name, engine.model)
        assert spec is not None
        found[name] = spec
    made = list(found.items())
    return made if embedded or own is None or own in found.values() else [("--draft", own), *made]


def run(engine: EngineChoice, asked: Asked, config: EngineConfig, params: SamplingParams, args: VerifyArgs) -> int:
    """Make the certificates, append each to `args.out` as it is made, show them; exit code 1 if anything failed."""
    from sameseed.cli.console import progress
    from sameseed.ops import resolve
    from sameseed.study import certificate_every as every, record
    from sameseed.study.certificate_page import render_every

    resolve(config.backend, config.device)  # what is not here is said once, not by every certificate
    outcomes: list[Outcome] = []
    with progress("certificates", args.json) as bar:
        task = bar.tasks[0].id

        def tick(cell: every.Cell, done: int, total: int) -> None:
            name = f"{cell.name}, {cell.format}, {cell.kv_format}, batch {cell.batch}"
            bar.update(task, description=name, completed=done, total=total)

        for outcome in every.run(every.cells(drafts_of(engine)), asked, config, params, tick):
            outcomes.append(outcome)
            if outcome.record is None:
                continue
            if args.out is not None:
                record.append(args.out, outcome.record)
            if args.json:
                print(json.dumps(outcome.record), flush=True)
    verdict = every.verdict(outcomes)
    if not args.json:
        _show(outcomes, verdict)
    if args.html is not None:
        args.html.write_text(render_every(outcomes, verdict), encoding="utf-8")
    return 1 if verdict == "failed" else 0


def _show(outcomes: Seq[Outcome], verdict: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, table = Console(highlight=False), Table(box=None, pad_edge=False)
    for head in ("draft", "weights", "cache", "batch", "checks", "", "s"):
        table.add_column(head)
    for o in outcomes:
        cell, found = o.cell, o.record
        table.add_row(
            *(cell.name, cell.format, cell.kv_format, str(cell.batch)),
            *("" if found is None else str(len(found["checks"])), Text(o.verdict, style=COLOURS[o.verdict])),
            "" if found is None else f"{found['seconds']:.0f}",
        )
    console.print(table)
    for o in outcomes:
        for text in wrong_in(o):
            console.print(Text(f"{o.cell.name}, {o.cell.format}, batch {o.cell.batch}: {text}", style="red"))
    style = COLOURS[verdict]
    console.print(Text(f"\nall {len(outcomes)} configurations: {verdict}", style=style))


def wrong_in(outcome: Outcome) -> list[str]:
    """What a cell's certificate found wrong, or why there is none."""
    if outcome.record is None:
        return [outcome.failure]
    failed = [c for c in outcome.record["checks"] if c["status"] == "failed"]
    return [
        f"{c['id']} {c['name']}: {f['where']}: expected {f['expected']}, found {f['found']}"
        for c in failed
        for f in c["findings"][:1]
    ]
