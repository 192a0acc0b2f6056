"""`sameseed verify-server`: does a server with OpenAI's API return the same texts, whatever else it serves?"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

from sameseed_verify import VerifyError

if TYPE_CHECKING:
    from sameseed_verify.wire import Endpoint

COLOURS = {"holds": "green", "broken": "bold red", "not shown": "yellow"}
EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
WIDE = 200  # columns of a table that is not for a terminal


def option(metavar: str | None = None) -> Any:
    """Help settings of a field that may stay unset: its metavar, and no "(default: None)"."""
    return arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class VerifyServerArgs:
    """Does a server with OpenAI's API return the same text for the same request?

    Alone, under load, streamed, from the prefix cache, with speculation off and on.

    Exit code 0: all promises hold; 1: one is broken; 3: not shown; 2: bad usage.
    """

    url: Annotated[str, Positional]  # the server's address
    name: Annotated[str | None, option("NAME")] = None  # the model's name on the server; unset: the first listed
    chat: Annotated[bool, option()] = False  # /v1/chat/completions instead of /v1/completions
    prompts: Annotated[Path | None, option("FILE")] = None  # .jsonl or .txt; unset: built-in
    num_prompts: Annotated[int | None, option("N")] = None  # most prompts; unset: what --requests allow
    max_tokens: int = 48  # longest answer
    requests: int = 200  # most requests
    seconds: float = 300.0  # most seconds; a running request is waited for
    concurrency: int = 4  # requests at once, for checks under load
    timeout: float = 120.0  # seconds for one request
    seed: int = 1  # of sampled texts and of the load's order
    only: Annotated[tuple[str, ...], option("ID")] = ()  # check only these promises, e.g. load stream; unset: all
    again: Annotated[Path | None, option("FILE")] = None  # compare with the last report in this file
    api_key_file: Annotated[Path | None, option("FILE")] = None  # the key, on its first line
    api_key_variable: str = "SAMESEED_API_KEY"  # environment variable with the key, if there is no file
    html: Annotated[Path | None, option("FILE")] = None  # write the report as one page
    out: Annotated[Path | None, option("FILE")] = None  # append the report (one JSON line) to a file
    json: Annotated[bool, option()] = False  # the report to stdout instead of a table


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
    try:
        return _run(args)
    except VerifyError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _run(args: VerifyServerArgs) -> int:
    from sameseed_verify.verify import EXIT_CODES

    earlier = None if args.again is None else last_report(args.again)
    for path, flag in ((args.out, "--out"), (args.html, "--html")):
        if path is not None:
            _prepare(path, flag)
    report = asyncio.run(_ask(args, _endpoint(args), earlier))
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")
    if args.html is not None:
        from sameseed_verify.page import render

        args.html.write_text(render(report), encoding="utf-8")
    if args.json:
        print(json.dumps(report), flush=True)
    else:
        _show(report)
    return EXIT_CODES[report["verdict"]]


async def _ask(args: VerifyServerArgs, endpoint: Endpoint, earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    from sameseed_verify import wire
    from sameseed_verify.verify import ServerSettings, verify

    names = ("num_prompts", "max_tokens", "requests", "seconds", "concurrency", "timeout", "seed", "only")
    settings = ServerSettings(args.prompts, **{name: getattr(args, name) for name in names})
    key = _read_key(args.api_key_file, args.api_key_variable)
    with _stages(args.json) as tick:
        async with wire.open_client(key, settings.concurrency + 1, settings.timeout) as client:
            return await verify(client, endpoint, settings, earlier, tick)


def _endpoint(args: VerifyServerArgs) -> Endpoint:
    """The server's endpoint; its URL may end in the API's version, e.g. /v1. Raises VerifyError."""
    from sameseed_verify.wire import Endpoint

    url, _, version = args.url.rstrip("/").rpartition("/")
    if not (version[:1] == "v" and version[1:].isdigit()):
        url, version = args.url.rstrip("/"), "v1"
    if not url.startswith(("http://", "https://")) or len(url) < len("http://x"):
        raise VerifyError(f"give a server's address, e.g. http://127.0.0.1:8000, got {args.url!r}")
    return Endpoint(url, args.name or "", args.chat, version)


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
    from sameseed_verify.verify import SCHEMA

    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise VerifyError(f"cannot read the earlier report from {path} ({error}); --out writes one") from None
    reports = [r for r in records if isinstance(r, dict) and r.get("schema") == SCHEMA]
    if not reports:
        raise VerifyError(f"{path} holds no report of this command; --out writes one")
    return dict(reports[-1])


@contextmanager
def _stages(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar. Yields a function of a stage's name, the number of stages done, and their total."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)


def _show(report: Mapping[str, Any]) -> None:
    """Print a table of the promises, changed texts in detail, and the verdict last."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sameseed_verify.page import compared_text, counts_text, first_text, numbers_text

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
    console.print(
        Text(f"\n{asked}{failed}" + (f"; ended early: {report['ended']}" if report["ended"] else ""), style="dim")
    )
    verdict = f"{report['verdict']}: {c['model']} ({c['engine']}), {counts_text(report)}"
    console.print(Text(verdict, style=COLOURS[report["verdict"]]))
