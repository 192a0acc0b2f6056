"""`sameseed tune --engine vllm --url U`: which draft length pays in a vLLM that runs, by sequences at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sameseed.errors import ConfigError
from sameseed.request import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from sameseed.cli.flags import TuneArgs
    from sameseed_vllm.tune_server import LengthRow, Look, ServerTuneRequest


def tune(args: TuneArgs) -> int:
    """Measure, add to the costs in `args.cost`, and, once lengths can be compared, write the profile to `args.out`."""
    from sameseed.cli.console import stages
    from sameseed.plan.engines import read_costs
    from sameseed.plan.profile_file import write
    from sameseed_vllm import tune_server

    asked = _request(args)
    before = read_costs(args.cost, "vllm") if args.cost.exists() else None
    with stages(f"tuning {asked.url}", args.json) as tell:
        looks = asyncio.run(tune_server.measure(asked, tell))
    costs = tune_server.added(before, looks, asked.draft)
    tune_server.write_costs(costs, args.cost)
    rows, todo = tune_server.rows_of(costs), tune_server.next_run(costs)
    if rows:
        write(tune_server.as_tuned(asked, args.model, costs), args.out)
    if args.json:
        said = {"looks": [asdict(x) for x in looks], "rows": [asdict(r) for r in rows], "restart": todo}
        print(json.dumps(said))
    else:
        _show(looks, rows, todo, args.out)
    return 0


def _request(args: TuneArgs) -> ServerTuneRequest:
    from sameseed.cli.bench_serve import read_key
    from sameseed.cli.options import numbers
    from sameseed.measure.workload import DEFAULT_PROMPTS, read_prompts
    from sameseed_vllm.tune_server import ServerTuneRequest

    if args.url is None:
        raise ConfigError("--engine vllm measures a vLLM that runs: give its address with --url")
    if len(args.drafts) != 1:
        raise ConfigError("--engine vllm: name the one draft that it runs with, or would, with --drafts")
    if not args.seconds > 0:
        raise ConfigError(f"--seconds must be above 0, got {args.seconds:g}")
    return ServerTuneRequest(
        args.url,
        args.drafts[0],
        tuple(read_prompts(args.prompts or DEFAULT_PROMPTS, args.num_prompts)),
        SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed),
        numbers("batch", args.batch),
        args.seconds,
        read_key(args.api_key_file),
    )


def _show(looks: Seq[Look], rows: list[LengthRow], todo: str | None, out: Path) -> None:
    """Show what was measured, which length pays, and what to run next."""
    from sameseed.cli.console import show_table, stdout_console
    from sameseed_vllm.tune_server import best_of

    console = stdout_console()
    for x in looks:
        what = f"{x.k} draft tokens, {1 + sum(x.survival):.2f} tokens a round" if x.k else "no draft"
        console.print(f"{x.batch} at once: {what}, {x.round_ms:.2f} ms a round ({x.num_rounds} rounds)", markup=False)
    if rows:
        show_table(_table(rows, best_of(rows)))
        console.print(f"written: {out}; its command: sameseed export vllm {out}", markup=False)
    if todo:
        console.print(f"vLLM has one length at a time: restart it {todo}, and run this again", markup=False)


def _table(rows: list[LengthRow], best: dict[int, LengthRow]) -> Table:
    """A table of each length at each batch size."""
    from sameseed.report import table as layout

    heads = ("at once", "draft tokens", "tokens a round", "ms a round", "times plain decoding", "")
    table = layout.table("", heads, left=(5,))
    for r in rows:
        said = " ".join(word for word, holds in (("best", best[r.batch] == r), ("computed", not r.measured)) if holds)
        table.add_row(str(r.batch), str(r.k or "off"), f"{r.tokens:.2f}", f"{r.round_ms:.2f}", f"{r.speedup:.2f}", said)
    return table
