"""`sameseed verify-server`: does a server with OpenAI's API return the same texts, whatever else it serves?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from sameseed.study.load.wire import Endpoint
    from sameseed.study.promises.verify import ServerSettings

COLOURS = {"holds": "green", "broken": "bold red", "not shown": "yellow"}


@dataclass(frozen=True)
class VerifyServerArgs:
    """Check if a server with OpenAI's API (sameseed, vLLM, SGLang, llama-server, OpenVINO) keeps its texts the same.

    Greedy texts are repeated under load, streamed, from the prefix cache, later, and with speculation off and on. Also
    seeds, log-probabilities, near ties. Exit code 0: all promises hold; 1: one is broken; 3: not shown; 2: bad usage.
    """

    url: Annotated[str, Positional]  # the server's address
    name: Annotated[str | None, option("NAME")] = None  # the model's name on the server; unset: the first listed
    chat: Annotated[bool, option()] = False  # /v1/chat/completions instead of /v1/completions
    model: Annotated[str | None, option("FOLDER")] = None  # its weights: also compare with a textbook decoder
    format: str = "auto"  # number format of these weights, as the server stores them
    kv_format: str = "auto"  # number format of the server's KV cache (auto: bf16)
    # near ties: this share of the largest logit; unset: by format
    tolerance: Annotated[float | None, option("X")] = None
    prompts: Annotated[Path | None, option("FILE")] = None  # .jsonl, .txt, or a set as gsm8k:DIR; unset: built-in
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


def run(argv: Seq[str], prog: str) -> int:
    """Check the arguments, query the server, show, write; the exit code gives the verdict."""
    args = parse(VerifyServerArgs, argv, prog).args
    from sameseed.study import record
    from sameseed.study.promises.verify import EXIT_CODES, ServerSettings

    names = ("num_prompts", "max_tokens", "requests", "seconds", "concurrency", "timeout", "seed", "only")
    settings = ServerSettings(args.prompts, **{name: getattr(args, name) for name in names})
    endpoint = _endpoint(args)
    earlier = None if args.again is None else _earlier(args.again)
    for path, flag in ((args.out, "--out"), (args.html, "--html")):
        if path is not None:
            record.prepare(path, flag)
    found = asyncio.run(_ask(args, endpoint, settings, earlier))
    if args.out is not None:
        record.append(args.out, found)
    if args.html is not None:
        from sameseed.study.promises.page import render

        args.html.write_text(render(found), encoding="utf-8")
    if args.json:
        print(json.dumps(found), flush=True)
    else:
        _show(found)
    return EXIT_CODES[found["verdict"]]


async def _ask(
    args: VerifyServerArgs, endpoint: Endpoint, settings: ServerSettings, earlier: Mapping[str, Any] | None
) -> dict[str, Any]:
    from sameseed.cli.bench_serve import read_key
    from sameseed.cli.console import stages
    from sameseed.study.load import wire
    from sameseed.study.promises.verify import verify
    from sameseed.study.promises.weights import load_weights

    key = read_key(args.api_key_file, args.api_key_variable)
    with stages(f"asking {endpoint.url}", args.json) as tick:
        async with wire.open_client(key, settings.concurrency + 1, settings.timeout) as client:
            await wire.introduce(client, endpoint, "--name")  # before weights are read
            weights = None
            if args.model is not None:
                weights = load_weights(args.model, args.format, args.kv_format, args.tolerance)
            return await verify(client, endpoint, settings, weights, earlier, tick)


def _endpoint(args: VerifyServerArgs) -> Endpoint:
    """The server's endpoint; its URL may end in the API's version, e.g. /v1. Raises ConfigError."""
    from sameseed.study.load.wire import Endpoint, base_url

    url, _, version = args.url.rstrip("/").rpartition("/")
    if not (version[:1] == "v" and version[1:].isdigit()):
        url, version = args.url, "v1"
    try:
        return Endpoint("server", base_url(url), args.name or "", args.chat, version=version)
    except ConfigError:
        raise ConfigError(f"give a server's address, e.g. http://127.0.0.1:8000, got {args.url!r}") from None


def _earlier(path: Path) -> dict[str, Any]:
    """The last report in a file. Raises ConfigError."""
    from sameseed.study import record
    from sameseed.study.schemas import SERVER_SCHEMA

    try:
        found = [r for r in record.read(path) if r["schema"] == SERVER_SCHEMA]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the earlier report from {path} ({error}); --out writes one") from None
    if not found:
        raise ConfigError(f"{path} holds no report of `sameseed verify-server`; --out writes one")
    return found[-1]


def _show(found: Mapping[str, Any]) -> None:
    """Print a table of the promises, changed texts in detail, and the verdict last."""
    from rich.table import Table
    from rich.text import Text

    from sameseed.cli.console import show_table, stdout_console
    from sameseed.study.promises.page import compared_text, counts_text, first_text, numbers_text

    console, table = stdout_console(), Table("", "promise", "compared", "changed", "", box=None, pad_edge=False)
    for p in found["promises"]:
        said = first_text(p) or p["why"] or numbers_text(p["numbers"])
        cells = (p["id"], compared_text(p), str(p["differing"] or ""), Text(said))
        table.add_row(Text(p["status"], style=COLOURS[p["status"]]), *cells)
    show_table(table)
    for p in found["promises"]:
        if p["status"] == "holds":
            continue
        console.print(Text(f"\n{p['name']}: {p['status']}: {p['says']}", style=COLOURS[p["status"]]))
        for d in p["differences"]:
            console.print(Text(f"  {d['where']}, character {d['at']}"))
            console.print(Text(f"    expected {d['expected']!r}\n    found    {d['found']!r}"))
        for note in (*p["notes"], *([f"to set: {p['advice']}"] if p["advice"] else ())):
            console.print(Text(f"  {note}"))
    c = found["config"]
    asked = f"{found['requests']} requests, {c['num_prompts']} prompts, {found['seconds']:.0f} s"
    failed = "".join(f", {n} {kind}" for kind, n in found["failures"].items())
    console.print(
        Text(f"\n{asked}{failed}" + (f"; ended early: {found['ended']}" if found["ended"] else ""), style="dim")
    )
    verdict = f"{found['verdict']}: {c['model']} ({c['engine']}), {counts_text(found)}"
    console.print(Text(verdict, style=COLOURS[found["verdict"]]))
