"""`sameseed verify-lossless`: prove, or disprove, that speculation changes nothing in a configuration."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sameseed.cli.options import FIXED, option, parse
from sameseed.config import EngineConfig
from sameseed.request import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from sameseed.laws.check import Check
    from sameseed.measure.certificate import Asked, Certificate

LEFT_OUT = ("n", "logprobs")
EXIT = {"failed": 1, "not shown": 3}  # exit codes by verdict, if not 0
GREEN, RED, YELLOW = "green", "bold red", "yellow"
COLOURS = {  # of a check, or of a whole certificate
    "passed": GREEN,
    "these checks passed": GREEN,
    "failed": RED,
    "warning": YELLOW,
    "not shown": YELLOW,
}


@dataclass(frozen=True)
class VerifyArgs:
    """Certify that speculation changes no output: tokens, log-probabilities, the distribution of samples, the cache.

    The engine's flags are generate's. The sampling flags are for sampled outputs; greedy ones are always checked too.
    Exit code 0: all checks that ran passed; 1: one failed; 2: bad usage; 3: not enough evidence.
    """

    effort: str = "quick"  # quick, normal, full, or a number: the share of the full sizes (full is 1)
    prompts: Annotated[Path | None, option("FILE")] = None  # .jsonl, .txt, or a set as gsm8k:DIR; unset: embedded
    num_prompts: Annotated[int | None, option("N")] = None  # take N of them, spread over the file; unset: all
    batch: int = 8  # sequences that run together
    only: Annotated[tuple[str, ...], option("ID")] = ()  # run these checks alone, e.g. L3 L6; unset: all
    html: Annotated[Path | None, option("FILE")] = None  # write the certificate as one page
    out: Annotated[Path | None, option("FILE")] = None  # append the record (one JSON line) to a file
    json: Annotated[bool, option()] = False  # the record to stdout instead of tables


def run(argv: Seq[str], prog: str) -> int:
    """Check the arguments, run, show, write; see EXIT."""
    defaults = {"temperature": 0.8, "top_p": 0.95, "seed": 1, "max_tokens": 32, **FIXED}
    parsed = parse(VerifyArgs, argv, prog, engine=True, sampling=True, defaults=defaults, left_out=LEFT_OUT)
    args = parsed.args
    from sameseed.cli.console import check_outputs
    from sameseed.engine.settings import make_config
    from sameseed.laws.check import Effort
    from sameseed.laws.checks import chosen
    from sameseed.measure import certificate as suite
    from sameseed.measure.workload import DEFAULT_PROMPTS

    effort = Effort.parse(args.effort)
    checks = chosen(args.only)
    check_outputs((args.out, "--out"), (args.html, "--html"))
    prompts, max_tokens = args.prompts or DEFAULT_PROMPTS, parsed.params.max_tokens
    asked = suite.Asked(parsed.engine.model, prompts, args.num_prompts, max_tokens, args.batch, effort)
    config = make_config(**parsed.engine.settings)
    return _one(asked, config, parsed.params, args, checks)


def _one(asked: Asked, config: EngineConfig, params: SamplingParams, args: VerifyArgs, checks: Seq[Check]) -> int:
    """Make, write and show one certificate; returns the exit code."""
    from sameseed.cli.console import keep, stages, stderr_console
    from sameseed.measure import certificate as suite

    with stages(f"loading {asked.model}", args.json) as tick:
        subject = suite.load_subject(
            asked, config, params, lambda done, total: tick("million weights", done // 10**6, total // 10**6)
        )
        certificate = suite.certify(subject, asked, checks, tick)
    found = certificate.as_dict()
    keep([found], args.out, args.json)
    if args.html is not None:
        from sameseed.measure.certificate_page import render

        args.html.write_text(render(found), encoding="utf-8")
    if not args.json:
        _show(certificate, found)
        for written in (args.out, args.html):
            if written is not None:
                stderr_console().print(f"written: {written}", style="dim")
    return EXIT.get(certificate.verdict, 0)


def _show(certificate: Certificate, found: dict[str, Any]) -> None:
    """Print a table of the checks, failures in detail, and the verdict last."""
    from rich.table import Table
    from rich.text import Text

    from sameseed.cli.console import show_table, stdout_console
    from sameseed.laws.statistics import bound_text
    from sameseed.measure.certificate_page import sizes_text, statistic_text, summary

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
    from rich.text import Text

    for r in certificate.results:
        if r.status != "passed":
            console.print(Text(f"\n{r.check.id} {r.check.name}: {r.status}", style=COLOURS[r.status]))
            for note in [*r.found.lacking, *([r.check.remedy] if r.found.lacking else []), *r.found.notes]:
                console.print(Text(f"  {note}"))
            for f in r.found.findings:
                console.print(Text(f"  {f.where}\n    expected {f.expected}\n    found    {f.found}"))
