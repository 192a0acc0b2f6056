"""`sameseed verify-lossless`: prove, or disprove, that speculation changes nothing in a configuration."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sameseed.cli.console import check_outputs, keep, show_table, stages, stderr_console, stdout_console
from sameseed.cli.flags import VerifyArgs
from sameseed.cli.options import Parsed
from sameseed.config import EngineConfig
from sameseed.engine.settings import make_config
from sameseed.laws.check import Check, Effort
from sameseed.laws.checks import chosen
from sameseed.laws.statistics import bound_text
from sameseed.measure import certificate as suite
from sameseed.measure.certificate import Asked, Certificate
from sameseed.measure.certificate_page import render, sizes_text, statistic_text, summary
from sameseed.measure.workload import DEFAULT_PROMPTS
from sameseed.request import SamplingParams

EXIT = {"failed": 1, "not shown": 3}  # exit codes by verdict, if not 0
GREEN, RED, YELLOW = "green", "bold red", "yellow"
COLOURS = {  # of a check, or of a whole certificate
    "passed": GREEN,
    "these checks passed": GREEN,
    "failed": RED,
    "warning": YELLOW,
    "not shown": YELLOW,
}


def run(parsed: Parsed[VerifyArgs]) -> int:
    """Check the arguments, run, show, write; see EXIT."""
    args = parsed.args
    effort = Effort.parse(args.effort)
    checks = chosen(args.only)
    check_outputs((args.out, "--out"), (args.html, "--html"))
    prompts, max_tokens = args.prompts or DEFAULT_PROMPTS, parsed.params.max_tokens
    asked = suite.Asked(parsed.engine.model, prompts, args.num_prompts, max_tokens, args.batch, effort)
    config = make_config(**parsed.engine.settings)
    return _one(asked, config, parsed.params, args, checks)


def _one(asked: Asked, config: EngineConfig, params: SamplingParams, args: VerifyArgs, checks: Seq[Check]) -> int:
    """Make, write and show one certificate; returns the exit code."""
    with stages(f"loading {asked.model}", args.json) as tick:
        subject = suite.load_subject(
            asked, config, params, lambda done, total: tick("million weights", done // 10**6, total // 10**6)
        )
        certificate = suite.certify(subject, asked, checks, tick)
    found = certificate.as_dict()
    keep([found], args.out, args.json)
    if args.html is not None:
        args.html.write_text(render(found), encoding="utf-8")
    if not args.json:
        _show(certificate, found)
        for written in (args.out, args.html):
            if written is not None:
                stderr_console().print(f"written: {written}", style="dim")
    return EXIT.get(certificate.verdict, 0)


def _show(certificate: Certificate, found: dict[str, Any]) -> None:
    """Print a table of the checks, failures in detail, and the verdict last."""
    console = stdout_console()
    table = Table("", "check", "looked at", "found", "s", box=None, pad_edge=False)
    for r in certificate.results:
        cells = [f"{r.check.id} {r.check.name}", sizes_text(r.found.sizes), statistic_text(r.found.statistic)]
        table.add_row(Text(r.status, style=COLOURS[r.status]), *cells, f"{r.seconds:.1f}")
    show_table(table)
    _show_wrong(certificate, console)
    console.print()
    for line in summary(found):
        console.print(Text(line))
    words = {
        "passed": ("lossless", "bold green"),
        "failed": ("NOT lossless, or not provable", RED),
        "not shown": ("not shown: not enough evidence to say whether it is lossless", "bold yellow"),
    }
    verdict, style = words.get(certificate.verdict, (certificate.verdict, "bold yellow"))
    if certificate.left_out:
        console.print(Text(f"\nleft out: {', '.join(certificate.left_out)}", style=YELLOW))
    console.print(Text(f"\n{verdict}: {certificate.config['label']}", style=style))
    alarm = sum(r.found.false_alarm for r in certificate.results)
    chance = f"below {bound_text(alarm)}" if alarm else "0 (bits were compared)"
    console.print(f"probability that a correct engine fails: {chance}", style="dim")


def _show_wrong(certificate: Certificate, console: Console) -> None:
    """Print failures and warnings in detail."""
    for r in certificate.results:
        if r.status != "passed":
            console.print(Text(f"\n{r.check.id} {r.check.name}: {r.status}", style=COLOURS[r.status]))
            for note in [*r.found.lacking, *([r.check.remedy] if r.found.lacking else []), *r.found.notes]:
                console.print(Text(f"  {note}"))
            for f in r.found.findings:
                console.print(Text(f"  {f.where}\n    expected {f.expected}\n    found    {f.found}"))
