"""`sameseed verify-server`: does a server with OpenAI's API return the same texts, whatever else it serves?"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from sameseed_verify import VerifyError
from sameseed_verify.ask import open_client
from sameseed_verify.inquiry import VerifyServerArgs
from sameseed_verify.page import compared_text, counts_text, first_text, numbers_text, render
from sameseed_verify.verify import EXIT_CODES, SCHEMA, verify

COLOURS = {"holds": "green", "broken": "bold red", "not shown": "yellow"}
EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
WIDE = 200  # columns of a table that is not for a terminal


def main() -> int:
    """The program `sameseed-verify`."""
    try:
        return run(sys.argv[1:], "sameseed-verify")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def run(argv: Seq[str], prog: str) -> int:
    """Check the arguments, query the server, show, write; the exit code gives the verdict."""
    args = tyro.cli(VerifyServerArgs, args=list(argv), prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    paths: dict[str, Any] = {n: Path(os.path.expanduser(p)) for n, p in vars(args).items() if isinstance(p, Path)}
    args = replace(args, **paths)  # no shell does so after `--out=`
    try:
        earlier = None if args.again is None else last_report(args.again)
        for path, flag in ((args.out, "--out"), (args.html, "--html")):
            if path is not None:
                _prepare(path, flag)
        report = asyncio.run(_verify(args, earlier))
    except VerifyError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")
    if args.html is not None:
        args.html.write_text(render(report), encoding="utf-8")
    if args.json:
        print(json.dumps(report), flush=True)
    else:
        _show(report)
    return EXIT_CODES[report["verdict"]]


async def _verify(args: VerifyServerArgs, earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """The report, with a progress bar meanwhile."""
    key, quiet = _read_key(args.api_key_file, args.api_key_variable), args.json or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=None)

        def tick(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        async with open_client(args.url, key, args.concurrency + 1, args.timeout) as client:
            return await verify(client, args, earlier, tick)


def _read_key(file: Path | None, variable: str) -> str | None:
    """The API key: the file's first line, else the first key in the variable, else None. Raises VerifyError."""
    if file is None:
        return os.environ.get(variable, "").partition(",")[0].strip() or None
    try:
        key = file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise VerifyError(f"cannot read the API key from {file} ({error})") from None
    if not key:
        raise VerifyError(f"{file} holds no API key; write it on the first line")
    return key


def _prepare(path: Path, flag: str) -> None:
    """Check before the server is asked that a report can be written to `path`. Raises VerifyError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a", encoding="utf-8").close()
        if new:
            path.unlink()
    except OSError as error:
        raise VerifyError(f"cannot write to {path} ({error.strerror}); choose another with {flag}") from None


def last_report(path: Path) -> dict[str, Any]:
    """The last report in a file. Raises VerifyError."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise VerifyError(f"cannot read the earlier report from {path} ({error}); --out writes one") from None
    reports = [r for r in records if isinstance(r, dict) and r.get("schema") == SCHEMA]
    if not reports:
        raise VerifyError(f"{path} holds no report of this command; --out writes one")
    return dict(reports[-1])


def _show(report: Mapping[str, Any]) -> None:
    """Print a table of the promises, changed texts in detail, and the verdict last."""
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=WIDE)
    table = Table("", "promise", "compared", "changed", "", box=None, pad_edge=False)
    for p in report["promises"]:
        said = first_text(p) or p["why"] or numbers_text(p["numbers"])
        cells = (p["id"], compared_text(p), str(p["differing"] or ""), Text(said))
        table.add_row(Text(p["status"], style=COLOURS[p["status"]]), *cells)
    console.print(table)
    for p in report["promises"]:
        if p["status"] == "holds":
            continue
        console.print(Text(f"\n{p['name']}: {p['status']}: {p['says']}", style=COLOURS[p["status"]]))
        for d in p["differences"]:
            console.print(Text(f"  {d['where']}, character {d['at']}"))
            console.print(Text(f"    expected {d['expected']!r}\n    found    {d['found']!r}"))
        for note in (*p["notes"], *([f"to set: {p['advice']}"] if p["advice"] else ())):
            console.print(Text(f"  {note}"))
    c = report["config"]
    asked = f"{report['requests']} requests, {c['num_prompts']} prompts, {report['seconds']:.0f} s"
    failed = "".join(f", {n} {kind}" for kind, n in report["failures"].items())
    ended = f"; ended early: {report['ended']}" if report["ended"] else ""
    console.print(Text(f"\n{asked}{failed}{ended}", style="dim"))
    verdict = f"{report['verdict']}: {c['model']} ({c['engine']}), {counts_text(report)}"
    console.print(Text(verdict, style=COLOURS[report["verdict"]]))
