"""`foretoken demo`: the embedded model writes with and without speculation: the same text, and what it took."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from foretoken.cli.options import EngineChoice, draft_choice, option, parse
from foretoken.config import SpecConfig
from foretoken.errors import ConfigError
from foretoken.request import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.study.measure import Bench
    from foretoken.study.workload import Workload

KS = (3, 5, 7)
SHOWN_TOKENS = 96
TOKENS, MIN_TOKENS = 64, 8  # of one prompt: as many as time allows
REPEAT = 3
PROMPTS = (3, 16)  # at least and at most so many prompts


@dataclass(frozen=True)
class Args:
    """Watch the embedded model write with and without speculation, then compare them side by side."""

    model: Annotated[str, option("TEXT")] = "embedded"  # the target: 'embedded', a folder, or a hub id
    draft: Annotated[str, option("TEXT")] = "auto"  # its draft model; auto takes the embedded one
    prompts: Annotated[Path | None, option("FILE")] = None  # .jsonl or .txt; unset: the packaged prompts
    seconds: float = 30.0  # aim at so much time for the measurements
    out: Annotated[Path | None, option("FILE")] = None  # append the measurements here as JSON lines


def run(argv: Seq[str], prog: str) -> int:
    """Show, measure, conclude; exit code 1 if a text differed."""
    args = parse(Args, argv, prog).args
    if args.draft == "none" or (args.draft == "auto" and args.model != "embedded"):
        raise ConfigError("the demo needs a draft model; name one with --draft, or leave --model out")
    from rich.console import Console

    from foretoken.study import record, report
    from foretoken.study.workload import DEFAULT_PROMPTS, arms, read_prompts

    console = Console(highlight=False)
    if args.out is not None:
        record.prepare(args.out)
    path = args.prompts or DEFAULT_PROMPTS
    prompts = read_prompts(path)
    bench = _open(args, arms([SpecConfig("ngram"), _draft_spec(args)], KS))
    encoded = [p.encode(bench.llm.tokenizer) for p in prompts]
    shown = prompts[0]
    console.rule("[bold]one answer, written with a draft model")
    question = shown.text if shown.text is not None else shown.messages[-1]["content"]
    console.print(f"[dim]prompt:[/] {question}", markup=True)
    show_answer(bench, encoded[0], console)
    console.rule("[bold]side by side")
    num_prompts, num_tokens = _affordable(bench, encoded[0], args.seconds, len(prompts))
    chosen = tuple(encoded[i * len(encoded) // num_prompts] for i in range(num_prompts))
    run_id, here = record.now(), record.machine()
    console.print(
        f"[dim]{num_prompts} prompts of {path.name}, {num_tokens} tokens each, {REPEAT} rounds; all ways take turns on "
        f"{here['cpu']}, {here['cores']} cores, {here['isa'] or 'no native kernels'}[/]\n"
    )
    everything: list[dict[str, Any]] = []
    for params in (_params(0.0, num_tokens), _params(0.8, num_tokens)):
        workload = _workload(path.name, chosen, params)
        records = _measure(bench, workload, args, run_id, here)
        console.print(report.table(records))
        everything += records
    console.print(report.LEGEND, style="dim")
    console.print()
    return conclude(everything, console)


def _draft_spec(args: Args) -> SpecConfig:
    from foretoken.engine.llm import make_config

    return make_config(draft_choice(args.draft, args.model)).spec


def _open(args: Args, ways: Any) -> Bench:
    from foretoken.cli.bench import open_bench

    return open_bench(EngineChoice(args.model, {}), ways, [1], "auto", quiet=False)


def _params(temperature: float, max_tokens: int = TOKENS) -> SamplingParams:
    # The end token is ignored so that every prompt brings the same number of tokens.
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=0.95, seed=1, ignore_eos=True)


def _workload(name: str, prompts: tuple[tuple[int, ...], ...], params: SamplingParams) -> Workload:
    from foretoken.study.workload import Workload

    return Workload(name, prompts, params)


def show_answer(bench: Bench, prompt: tuple[int, ...], console: Console) -> None:
    """Stream one greedy answer with the first draft model, its accepted tokens marked."""
    from foretoken.cli.console import TextWriter, legend, summary

    bench.install(next(arm for arm in bench.arms if arm.spec.method != "ngram" and not arm.plain))
    params = SamplingParams(max_tokens=SHOWN_TOKENS)
    for delta in bench.llm.stream(prompt, SamplingParams(max_tokens=4)):  # warm: the first pass touches every weight
        del delta
    writer = TextWriter(sys.stdout, bench.llm.tokenizer, show_draft=True)
    console.print()
    for delta in bench.llm.stream(prompt, params):
        writer.write(delta)
        if delta.completion is not None:
            print("\n")
            print(legend(sys.stdout, sys.stdout))
            console.print(summary(delta.completion.metrics), style="dim", soft_wrap=True)
    console.print()


def _affordable(bench: Bench, prompt: tuple[int, ...], seconds: float, available: int) -> tuple[int, int]:
    """How many prompts, and tokens of each, fit into the time, from the speed of plain decoding here and now."""
    from foretoken.study.measure import Run, run_batch

    run_batch(bench.install(bench.arms[0]), [(prompt, _params(0.0))], trial := Run())
    share = trial.tokens_per_s * seconds / (len(bench.arms) * REPEAT * 2)  # tokens for one run of one way to decode
    low, high = (min(bound, available) for bound in PROMPTS)
    num_prompts = max(low, min(high, int(share / TOKENS)))
    return num_prompts, max(MIN_TOKENS, min(TOKENS, int(share / num_prompts)))


def _measure(bench: Bench, workload: Workload, args: Args, run_id: str, here: Any) -> list[dict[str, Any]]:
    from foretoken.cli.bench import run_with_progress
    from foretoken.study import record

    bench.check(workload)
    runs = run_with_progress(bench, workload, REPEAT, quiet=False)
    records = record.make_records(bench, args.model, workload, runs, run_id, here)
    if args.out is not None:
        for line in records:
            record.append(args.out, line)
    return records


def conclude(records: Seq[dict[str, Any]], console: Console) -> int:
    """Say what came out, whatever it was; the exit code."""
    guessed = [r for r in records if r["config"]["draft"] != "none"]
    differing = [r for r in guessed if not r["equals_plain"]]
    if differing:
        labels = ", ".join(r["config"]["label"] for r in differing)
        console.print(
            f"[bold red]The text differed from plain decoding's[/] with {labels}: that is a bug, please report it."
        )
        return 1
    best = max(guessed, key=lambda r: float(r["speedup"]))
    label, gain = best["config"]["label"], best["speedup"]
    console.print(
        f"[bold green]The same text every time[/], token for token, greedy and sampled, in {len(guessed)} settings."
    )
    if gain > 1:
        console.print(f"The fastest was [bold]{label}[/]: {gain:.2f} times the speed of plain decoding.")
    else:
        console.print(
            f"Nothing beat plain decoding here and now; the nearest was {label} at {gain:.2f} times its speed."
        )
    console.print("[dim]Next: foretoken generate --show-draft 'Write a function that adds two numbers.' --chat[/]")
    return 0
