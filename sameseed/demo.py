"""`sameseed demo`: shows draft tokens being accepted, then measures the speedup on a model of real size."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError
from sameseed.request import SamplingParams, SpecMetrics

if TYPE_CHECKING:
    from rich.console import Console

    from sameseed.engine.engine import Engine
    from sameseed.study.measure import Run

SHAPE = "llama-3.2-1b"
TARGET, HEAD = "embedded-target", "embedded-head"
CHAIN: dict[str, object] = {"top_k": 1}  # draft chains: on a CPU a tree costs more than it gains
SHOWN = ("records", "sums", "orders")  # domains of the embedded models' prompts that are shown
SHOWN_EACH = 3
SHOWN_TOKENS, TOKENS = 96, 64
MOST_PROMPTS = 8
ENOUGH = 4  # prompts; with fewer a warning is printed
HOW: dict[str, Any] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


@dataclass(frozen=True)
class DemoArgs:
    """Watch a small model's guesses being accepted, then measure what they bring at real size. Nothing is downloaded.

    The second part makes a twin in memory: a real model's shape with made-up weights that compute the small model.
    """

    # its shape, see profile --list; unset: llama-3.2-1b, if it fits
    shape: Annotated[str | None, option("NAME")] = None
    format: str = "w4a8"  # number format of its weights
    seconds: float = 40.0  # time to aim at for measuring it


def run(argv: Seq[str], prog: str) -> int:
    """Show, measure, conclude; exit code 1 if a text differed."""
    args = parse(DemoArgs, argv, prog).args
    if args.seconds <= 0:
        raise ConfigError(f"--seconds must be above 0, got {args.seconds:g}")
    from sameseed.cli.console import stdout_console
    from sameseed.study.twin import find_shape, open_head_twin

    name = args.shape or SHAPE
    with open_head_twin(find_shape(name), HEAD, TARGET, name):
        pass  # a mistyped or too small shape fails before anything is shown
    console = stdout_console()
    same = show_pair(console)
    try:
        plain, guessing = open_twins(args, console)
    except ConfigError as error:
        if args.shape is not None:
            raise
        console.print(f"\nReal size is left out: {error}", markup=False)
    else:
        same = measure(plain, guessing, args.seconds, console) and same
    console.print("\nNext: sameseed chat --show-draft, or sameseed info for what this machine can run", style="dim")
    return 0 if same else 1


def show_pair(console: Console) -> bool:
    """Stream greedy answers with accepted draft tokens marked; True if plain decoding gives the same texts."""
    from sameseed import LLM
    from sameseed.cli.console import TextWriter, legend
    from sameseed.study.workload import DEFAULT_PROMPTS, read_prompts

    plain = LLM(TARGET, prefix_cache=False)
    guessing = LLM(TARGET, HEAD, policy="fixed", draft_options=CHAIN, prefix_cache=False, target=plain.engine.runner)
    params = SamplingParams(max_tokens=SHOWN_TOKENS)
    title = "1. A small model writes records, adds and takes orders for coffee; a draft head guesses ahead"
    console.print(title, style="bold")
    total, num_tokens, num_plain, same = SpecMetrics(), 0, 0, True
    prompts = read_prompts(DEFAULT_PROMPTS)
    for prompt in (p for name in SHOWN for p in [q for q in prompts if q.domain == name][:SHOWN_EACH]):
        console.print(f"\n{prompt.messages[-1]['content']}", style="dim", markup=False)
        tokens = prompt.encode(plain.tokenizer)
        writer = TextWriter(sys.stdout, plain.tokenizer, show_draft=True)
        for delta in guessing.stream(tokens, params):
            writer.write(delta)
            done = delta.completion
        assert done is not None  # a stream ends with its completion
        print()
        expected = plain.generate(tokens, params)[0]
        same = same and done.token_ids == expected.token_ids
        total.add(done.metrics.spec)
        num_tokens, num_plain = num_tokens + len(done.token_ids), num_plain + expected.metrics.spec.num_rounds
    print(f"\n{legend(sys.stdout, sys.stdout)}")
    console.print(
        f"{total.num_accepted_tokens} of {total.num_draft_tokens} guesses accepted: {num_tokens} tokens in "
        f"{total.num_rounds} passes of the model instead of {num_plain}. {verdict(same)}\n"
    )
    return same


def open_twins(args: DemoArgs, console: Console) -> tuple[Engine, Engine]:
    """Make two engines that share weights, without and with a draft head, and print what they are.

    Raises ConfigError if memory is short.
    """
    from sameseed.cli.console import weights_progress
    from sameseed.engine.build import assemble
    from sameseed.engine.settings import make_config
    from sameseed.study.twin import find_shape
    from sameseed.study.twin.loaded import load_twins
    from sameseed.study.workload import ASSETS

    name = args.shape or SHAPE
    shape = find_shape(name)
    settings: dict[str, Any] = {"format": args.format, "max_model_len": 512, "max_num_seqs": 1, "prefix_cache": False}
    config = make_config(HEAD, draft_options=CHAIN, **settings)
    built = json.loads((ASSETS / "head" / "results.json").read_text())["acceptance"]["all"]["rate"]
    with weights_progress(f"making {name}") as report:
        got = load_twins(shape, TARGET, HEAD, config, name=name, progress=report)
    console.print(f"2. The same at real size, in the shape of {name}", style="bold")
    console.print(
        f"{got.target.config.num_parameters / 1e9:.2f} billion weights in {args.format}, in memory. They are made up: "
        "this is the speed of that shape, not its text. They compute the small model above, and so its guesses are "
        f"accepted as often: {built:.0%} of four in a row, on texts that it was not trained on. A pair of trained "
        "models has a rate of its own."
    )
    none = replace(got.config, spec=make_config(None).spec)
    plain = assemble(none, got.tokenizer, got.num_blocks, got.target)
    return plain, assemble(got.config, got.tokenizer, got.num_blocks, plain.runner, got.drafts)


def measure(plain: Engine, guessing: Engine, seconds: float, console: Console) -> bool:
    """Run both engines in turns, prompt by prompt, until the time is up; print a table. True if all texts are equal."""
    from sameseed.cli.console import progress
    from sameseed.study.measure import Run, run_batch
    from sameseed.study.workload import DEFAULT_PROMPTS, read_prompts

    runs = {how: (Run(), Run()) for how in HOW}
    end = time.monotonic() + seconds
    prompts = read_prompts(DEFAULT_PROMPTS, MOST_PROMPTS)
    with progress("measuring") as bar:
        bar.update(bar.tasks[0].id, total=len(prompts))
        for seed, prompt in enumerate(prompts):
            tokens = prompt.encode(plain.tokenizer)
            for how, pair in runs.items():
                job = (tokens, SamplingParams(max_tokens=TOKENS, seed=seed, **HOW[how]))
                for engine, done in zip((plain, guessing), pair, strict=True):
                    run_batch(engine, [job], done)
            bar.update(bar.tasks[0].id, advance=1)
            if time.monotonic() > end:
                break
    return conclude(runs, console)


def conclude(runs: dict[str, tuple[Run, Run]], console: Console) -> bool:
    """Print the table and the conclusion; True if all texts are the same."""
    from rich.table import Table

    from sameseed.cli.console import show_table

    table, gains = Table(box=None, pad_edge=False), []
    for name in ("", "tokens/s", "times", "kept", "repeats"):
        table.add_column(name, justify="right" if name else "left")
    for how, (plain, guessed) in runs.items():
        gain, rate, repeated = (
            guessed.tokens_per_s / plain.tokens_per_s,
            guessed.metrics.acceptance_rate,
            plain.repeated,
        )
        table.add_row(how, f"{plain.tokens_per_s:.1f}", "", "", "" if repeated is None else f"{repeated:.0%}")
        accepted = "none asked" if rate is None else f"{rate:.0%}"
        table.add_row("guessing", f"{guessed.tokens_per_s:.1f}", f"{gain:.2f}x", accepted)
        gains.append(f"{how} {gain:.2f} times as fast")
    console.print()
    show_table(table)
    same = all(plain.texts == guessed.texts for plain, guessed in runs.values())
    few = len(runs["greedy"][0].texts)
    console.print(
        f"{few} prompts, at most {TOKENS} tokens each, in turns. times: plain decoding; kept: guesses; "
        "repeats: 8-grams, which are easy to guess",
        style="dim",
    )
    console.print(f"\n{', '.join(gains)}. {verdict(same)}")
    if few < ENOUGH:
        console.print(
            "Too few prompts to tell: the machine is slow or busy; --seconds 180 measures more", style="yellow"
        )
    return same


def verdict(same: bool) -> str:
    """The text that says whether drafts changed a text, which must never happen."""
    return "Same text: [bold green]yes[/]" if same else "Same text: [bold red]NO[/], a bug, please report it"
