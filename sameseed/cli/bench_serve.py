"""`sameseed bench serve`: a load test of a server with OpenAI's API: what clients get, by concurrency or rate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sameseed.cli.console import check_outputs, keep, note, progress, show_table, stdout_console
from sameseed.cli.flags import DEFAULT_LENGTHS, BenchServeArgs
from sameseed.cli.options import Parsed, numbers, unread, words
from sameseed.config import parse_options
from sameseed.errors import ConfigError
from sameseed.measure.load import show, wire
from sameseed.measure.load.bench import LoadBench, LoadLevel, LoadSettings
from sameseed.measure.load.prompts import Shape, parse_shape
from sameseed.measure.load.show import draw, make_records
from sameseed.measure.load.wire import Endpoint, base_url
from sameseed.measure.workload import read_prompts
from sameseed.report import record
from sameseed.server.config import read_keys

# Flags that are fields of LoadSettings by the same name.
SETTINGS = ["prompts", "seed", "num_requests", "max_seconds", "warm_up", "repeat", "timeout", "max_retries", "strict"]
SETTINGS += ["ttft_slo", "tpot_slo"]


def run(parsed: Parsed[BenchServeArgs]) -> int:
    """Measure, write; exit code 1 if a request failed, or arms generated different outputs."""
    args = parsed.args
    settings, arms = _settings(args), _arms(args)
    check_outputs((args.out, "--out"), plot=args.plot)
    made = asyncio.run(_measure(args, arms, settings))
    if args.plot is not None and made:
        draw(made, args.plot)
    fine = all(not r["errors"] and (r["same_texts"] is None or r["same_texts"][0] == r["same_texts"][1]) for r in made)
    return 0 if fine else 1


async def _measure(args: BenchServeArgs, arms: Seq[Endpoint], settings: LoadSettings) -> list[dict[str, Any]]:
    widest = max((level.concurrency or 1024) for level in settings.levels)
    made: list[dict[str, Any]] = []
    run_id = record.now()
    async with wire.open_client(read_key(args.api_key_file, args.api_key_variable), widest, settings.timeout) as client:
        bench = LoadBench(client, arms, settings)
        await bench.prepare()
        for shape in bench.settings.shapes:
            found: list[dict[str, Any]] = []
            with progress(shape.label, args.json) as (update, _):
                update(total=len(settings.levels) * settings.repeat * len(arms), note="warm-up")
                for level in settings.levels:
                    runs = await bench.measure(shape, level, partial(update, advance=1))
                    done = make_records(bench, shape, level, runs, run_id)
                    keep(done, args.out, args.json)  # at once, so that a later failure loses nothing
                    found += done
            made += found
            if not args.json:
                show_table(show.table(found))
                for text in show.notes(found):
                    stdout_console().print(text, style="dim", markup=False)
    if not args.json:
        note(show.LEGEND + (f"; records appended to {args.out}" if args.out is not None else ""))
    return made


def _settings(args: BenchServeArgs) -> LoadSettings:
    if args.prompts in ("text", "random"):
        unread(args, ("max_tokens",), "--lengths are those of built-in prompts and of their answers")
        shapes = [parse_shape(text, args.scale) for text in words(",".join(args.lengths))]
    else:
        unread(args, ("lengths", "scale"), "prompts of a file are sent as they are, and --max-tokens ends answers")
        read_prompts(Path(args.prompts))
        shapes = [Shape(None, args.max_tokens)]
    if args.rates:
        unread(args, ("concurrency",), "--rates send requests whether or not others are answered")
        levels = [LoadLevel(rate=r, burstiness=args.burstiness) for r in numbers("rates", ",".join(args.rates), float)]
    else:
        unread(args, ("burstiness",), "it is of requests that arrive by --rates")
        levels = [LoadLevel(concurrency=c) for c in numbers("concurrency", ",".join(args.concurrency))]
    if not shapes or not levels:
        raise ConfigError(f"--{'lengths' if not shapes else 'concurrency'} is empty; give at least one value")
    sampling = {"temperature": args.temperature, "top_p": args.top_p}
    sampling |= {"ignore_eos": True} if args.ignore_eos else {}
    same = {name: getattr(args, name) for name in SETTINGS}
    fit = args.prompts in ("text", "random") and args.lengths == DEFAULT_LENGTHS and args.scale == 1.0
    return LoadSettings(tuple(shapes), tuple(levels), sampling=sampling, fit=fit, **same)


def _arms(args: BenchServeArgs) -> list[Endpoint]:
    """The endpoints to compare; the first is the baseline. Raises ConfigError."""
    if args.compare_speculation and args.baseline_url is not None:
        raise ConfigError("--compare-speculation and --baseline-url are two ways to compare; give one of them")
    extra = parse_options(args.extra_body, "--extra-body", '{"top_k": 20}') if args.extra_body else {}
    asked: dict[str, Any] = {}
    if (text := args.speculation) is not None:
        example = '{"num_draft_tokens": 4}'
        asked["speculation"] = parse_options(text, "--speculation", example) if text.lstrip()[:1] == "{" else text
    server = Endpoint("server", base_url(args.url), args.model or "", args.chat, {**extra, **asked})
    if args.compare_speculation:
        return [replace(server, label="off", fields={**extra, "speculation": "off"}), replace(server, label="on")]
    if args.baseline_url is not None:
        return [replace(server, label="baseline", url=base_url(args.baseline_url), fields=extra), server]
    return [server]


def read_key(file: Path | None, variable: str = "") -> str | None:
    """The API key: the file's first, else the first in the variable, else None. Raises ConfigError."""
    return next(iter(read_keys(file, variable if file is None else "")), None)
