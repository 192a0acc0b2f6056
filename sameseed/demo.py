"""`sameseed demo`: the embedded model writes with and without speculation: the same text, and what it took."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sameseed.cli.options import EngineChoice, draft_choice, option, parse
from sameseed.config import SpecConfig
from sameseed.errors import ConfigError
from sameseed.request import Completion, Delta, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from sameseed.study.measure import Bench
    from sameseed.study.workload import Arm, Prompt, Workload

KS = (3, 5, 7)
SHOWN_TOKENS = 96
TOKENS, FEW_TOKENS = 64, 32  # of one prompt: as a rule, and at least in every round but a slow machine's only one
MIN_TOKENS = 8
REPEAT = 3
PROMPTS = (3, 16)  # at least and at most so many prompts


@dataclass(frozen=True)
class DemoArgs:
    """Watch the embedded model write with and without speculation, then compare them side by side."""

    model: Annotated[str, option("TEXT")] = "embedded"  # the target: 'embedded', a folder, or a hub id
    draft: Annotated[str, option("TEXT")] = "auto"  # its draft model; auto takes the embedded one
    prompts: Annotated[Path | None, option("FILE")] = None  # .jsonl or .txt; unset: the packaged prompts
    seconds: float = 30.0  # time to aim at for the measurements
    out: Annotated[Path | None, option("FILE")] = None  # append the measurements here as JSON lines


def run(argv: Seq[str], prog: str) -> int:
    """Show, measure, conclude; exit code 1 if a text differed."""
    args = parse(DemoArgs, argv, prog).args
    if args.draft == "none" or (args.draft == "auto" and args.model != "embedded"):
        raise ConfigError("the demo needs a draft model; name one with --draft, or leave --model out")
    from rich.console import Console

    from sameseed.cli.bench import open_bench, run_with_progress
    from sameseed.cli.console import show_table
    from sameseed.engine.levels import with_heads
    from sameseed.engine.settings import make_config
    from sameseed.study import record, report
    from sameseed.study.workload import DEFAULT_PROMPTS, arms, read_prompts

    console = Console(highlight=False)
    if args.out is not None:
        record.prepare(args.out)
    path = args.prompts or DEFAULT_PROMPTS
    prompts = read_prompts(path)
    drafting = with_heads(make_config(draft_choice(args.draft, args.model), policy="fixed").spec)
    ways = arms([SpecConfig("ngram"), drafting], KS)
    bench = open_bench(EngineChoice(args.model, {}), ways, [1], "auto", quiet=False)
    same = show_both(bench, prompts[0], next(a for a in ways if a.spec.method == drafting.method), console)
    run_id = record.now()
    everything: list[dict[str, Any]] = []
    console.rule("[bold]side by side")
    for workload, repeat in plan(bench, path.name, prompts, args.seconds, console):
        runs = run_with_progress(bench, workload, repeat, quiet=False)
        everything += record.make_records(bench, args.model, workload, runs, run_id, record.machine())
        if args.out is not None:
            for line in everything[-len(ways) :]:
                record.append(args.out, line)
        show_table(report.table(everything[-len(ways) :]))
    console.print(report.LEGEND + "\n", style="dim")
    return max(conclude(everything, console), 0 if same else 1)


def show_both(bench: Bench, prompt: Prompt, drafting: Arm, console: Console) -> bool:
    """Stream one greedy answer without and with a draft model; True if both are the same, as they must be."""
    from rich.text import Text

    from sameseed.cli.console import legend

    question = prompt.text if prompt.text is not None else prompt.messages[-1]["content"]
    tokens = prompt.encode(bench.llm.tokenizer)
    console.print(Text("prompt: ", "dim") + Text(question))
    for arm in (bench.arms[0], drafting):
        for _ in _stream(bench, arm, tokens, 4):  # the first pass touches every weight: it would be slow for no reason
            pass
    console.rule("[bold]plain decoding: one pass of the model a token")
    plain = show_answer(bench, bench.arms[0], tokens, console)
    console.rule(f"[bold]speculative decoding: {drafting.label}")
    guessed = show_answer(bench, drafting, tokens, console)
    print(legend(sys.stdout, sys.stdout))
    gain = plain.metrics.total_time / guessed.metrics.total_time
    same = plain.token_ids == guessed.token_ids
    verdict = "[green]the same text[/]" if same else "[bold red]ANOTHER TEXT[/]"
    rounds = f"{guessed.metrics.spec.num_rounds} passes instead of {plain.metrics.spec.num_rounds}"
    console.print(f"{verdict}, {rounds}, in {1 / gain:.0%} of the time\n")
    return same


def show_answer(bench: Bench, arm: Arm, prompt: tuple[int, ...], console: Console) -> Completion:
    """Stream one greedy answer, its accepted draft tokens marked, and say what it took."""
    from sameseed.cli.console import TextWriter, summary

    writer = TextWriter(sys.stdout, bench.llm.tokenizer, show_draft=True)
    for delta in _stream(bench, arm, prompt, SHOWN_TOKENS):
        writer.write(delta)
        if delta.completion is not None:
            print("\n")
            console.print(summary(delta.completion.metrics), style="dim", soft_wrap=True)
            return delta.completion
    raise AssertionError("a stream ends with its completion")


def _stream(bench: Bench, arm: Arm, prompt: tuple[int, ...], max_tokens: int) -> Iterator[Delta]:
    bench.install(arm)
    return bench.llm.stream(prompt, SamplingParams(max_tokens=max_tokens))


def plan(bench: Bench, name: str, prompts: Seq[Prompt], seconds: float, console: Console) -> list[tuple[Workload, int]]:
    """Workloads, greedy and sampled, and how often to run them, that fit into the time here and now."""
    from sameseed.study import record
    from sameseed.study.measure import Run, run_batch
    from sameseed.study.workload import Workload

    tokens = prompts[0].encode(bench.llm.tokenizer)
    run_batch(bench.install(bench.arms[0]), [(tokens, _params(0.0, TOKENS))], trial := Run())
    num_prompts, num_tokens, repeat = affordable(trial.tokens_per_s * seconds / (2 * len(bench.arms)), len(prompts))
    chosen = tuple(prompts[i * len(prompts) // num_prompts].encode(bench.llm.tokenizer) for i in range(num_prompts))
    here, rounds = record.machine(), f"{repeat} round{'s' * (repeat > 1)}"
    console.print(
        f"{num_prompts} prompts of {name}, at most {num_tokens} tokens each, {rounds}; all ways take turns on "
        f"{here['cpu']}, {here['cores']} cores, {here['isa'] or 'no native kernels'}\n",
        style="dim",
    )
    made = [Workload(name, chosen, _params(temperature, num_tokens)) for temperature in (0.0, 0.8)]
    for workload in made:
        bench.check(workload)
    return [(workload, repeat) for workload in made]


def affordable(budget: float, available: int) -> tuple[int, int, int]:
    """Prompts, tokens of each and rounds for a budget of tokens for one way to decode; rounds are given up first."""
    low, high = (min(bound, available) for bound in PROMPTS)
    repeat = REPEAT if budget >= REPEAT * low * FEW_TOKENS else 1
    num_prompts = max(low, min(high, int(budget / repeat / TOKENS)))
    return num_prompts, max(MIN_TOKENS, min(TOKENS, int(budget / repeat / num_prompts))), repeat


def _params(temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=0.95, seed=1)


def conclude(records: Seq[dict[str, Any]], console: Console) -> int:
    """Say what came out, whatever it was; the exit code."""
    guessed = [r for r in records if r["config"]["draft"] != "none"]
    differing = [r for r in guessed if not r["equals_plain"]]
    if differing:
        labels = ", ".join(r["config"]["label"] for r in differing)
        console.print(f"[bold red]The text differed from plain decoding's[/] with {labels}: a bug, please report it.")
        return 1
    best = max(guessed, key=lambda r: float(r["speedup"]))
    label, gain = best["config"]["label"], best["speedup"]
    console.print(
        f"[bold green]The same text every time[/], token for token, greedy and sampled: {len(guessed)} settings."
    )
    if gain > 1:
        console.print(f"The fastest was [bold]{label}[/]: {gain:.2f} times the speed of plain decoding.")
    else:
        console.print(
            f"Nothing beat plain decoding here and now; the nearest was {label} at {gain:.2f} times its speed."
        )
    console.print("Next: sameseed chat --show-draft", style="dim")
    return 0
