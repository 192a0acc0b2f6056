"""`sameseed verify-lossless`: prove, or disprove, that speculation changes nothing in a configuration."""

from __future__ import annotations

from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from sameseed.cli.console import check_outputs, keep, note, show_table, stages, stdout_console
from sameseed.cli.flags import VerifyLosslessArgs
from sameseed.cli.options import Parsed
from sameseed.engine.settings import make_config
from sameseed.laws.check import Effort
from sameseed.laws.checks import chosen
from sameseed.laws.statistics import bound_text
from sameseed.measure import certificate as proof
from sameseed.measure.certificate import Certificate, certify, sizes_text, statistic_text
from sameseed.measure.workload import DEFAULT_PROMPTS
from sameseed.store import replacing

EXIT = {"failed": 1, "not shown": 3}  # exit codes by verdict, if not 0
COLOURS = {  # of a check, or of a whole certificate
    "passed": "green",
    **dict.fromkeys(("warning", "not shown", "these checks passed"), "yellow"),
    "failed": "bold red",
}
VERDICTS = {
    "passed": "lossless",
    "failed": "NOT lossless, or not provable",
    "not shown": "not shown: not enough evidence to say whether it is lossless",
}


def run(parsed: Parsed[VerifyLosslessArgs]) -> int:
    """Check the arguments, certify, show, write; see EXIT."""
    args, params = parsed.args, parsed.params
    effort, checks = Effort.parse(args.effort), chosen(args.only)
    check_outputs((args.out, "--out"), (args.html, "--html"))
    prompts = args.prompts or DEFAULT_PROMPTS
    asked = proof.Asked(parsed.engine.model, prompts, args.num_prompts, params.max_tokens, args.batch, effort)
    config = make_config(**parsed.engine.settings)
    with stages(f"loading {asked.model}", args.json) as tick:
        subject = proof.load_subject(
            asked, config, params, lambda done, total: tick("million weights", done // 10**6, total // 10**6)
        )
        certificate = certify(subject, asked, checks, tick)
    found = certificate.as_dict()
    try:
        keep([found], args.out, args.json)
        if args.html is not None:
            with replacing(args.html) as page:
                page.write(proof.render(found).encode())
    finally:
        if not args.json:
            _show(certificate, found)
    for written in filter(None, () if args.json else (args.out, args.html)):
        note(f"written: {written}")
    return EXIT.get(certificate.verdict, 0)


def _show(certificate: Certificate, found: dict[str, Any]) -> None:
    """Print a table of the checks, failures and warnings in detail, and the verdict last."""
    table = Table("", "check", "looked at", "found", "s", box=None, pad_edge=False)
    for r in certificate.results:
        cells = [f"{r.check.id} {r.check.name}", sizes_text(r.found.sizes), statistic_text(r.found.statistic)]
        table.add_row(Text(r.status, style=COLOURS[r.status]), *cells, f"{r.seconds:.1f}")
    show_table(table)
    say = partial(stdout_console().print, markup=False)
    for r in (r for r in certificate.results if r.status != "passed"):
        say(f"\n{r.check.id} {r.check.name}: {r.status}", style=COLOURS[r.status])
        for text in [*r.found.lacking, *([r.check.remedy] if r.found.lacking else []), *r.found.notes]:
            say(f"  {text}")
        for f in r.found.findings:
            say(f"  {f.where}\n    expected {f.expected}\n    found    {f.found}")
    say("\n" + "\n".join(proof.summary(found)))
    if certificate.left_out:
        say(f"\nleft out: {', '.join(certificate.left_out)}", style="yellow")
    verdict = VERDICTS.get(certificate.verdict, certificate.verdict)
    say(f"\n{verdict}: {certificate.config['label']}", style=f"bold {COLOURS[certificate.verdict]}")
    alarm = sum(r.found.false_alarm for r in certificate.results)
    chance = f"below {bound_text(alarm)}" if alarm else "0 (bits were compared)"
    say(f"probability that a correct engine fails: {chance}", style="dim")
