"""`sameseed tune`: find the draft, formats and lengths that are fastest here, for these texts; write them to a file."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from sameseed import registry
from sameseed.cli.options import EMBEDDED, EMBEDDED_DRAFT, EMBEDDED_HEAD, EngineChoice, draft_choice, option, parse
from sameseed.errors import ConfigError
from sameseed.request import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from sameseed.plan.candidates import TuneRequest
    from sameseed.plan.tune import TuneOutcome
    from sameseed.tuned import Tuned


OUT = arg(metavar="FILE", aliases=["-o"])


@dataclass(frozen=True)
class TuneArgs:
    """Choose how to draft, in which formats and how far: predicted, then checked in turns with plain decoding.

    Answers end where they end by themselves. What was chosen is written as TOML for `serve --profile`, LLM(profile=)
    and the other commands, with what was promised, what was measured, and what lost.
    """

    model: Annotated[str, Positional]  # the target: 'embedded', a folder, or a hub id
    prompts: Annotated[Path | None, option("FILE")] = None  # .jsonl (prompt or messages) or .txt; unset: the embedded
    num_prompts: int = 32  # at most so many of them, spread over the file
    max_tokens: int = 96  # longest answer
    temperature: float = 0.0  # as your users sample
    seed: int = 1
    drafts: Annotated[
        tuple[str, ...], option("TEXT")
    ] = ()  # as --draft; unset: those without a model, and embedded ones
    formats: tuple[str, ...] = ("auto",)  # number formats of the target's weights
    kv_formats: tuple[str, ...] = ("auto",)  # of the cache
    draft_formats: tuple[str, ...] = ("auto",)  # of the drafts' weights
    batches: tuple[int, ...] = (1, 4)  # sequences at once that are tried
    objective: str = "balanced"  # latency (the smallest batch), throughput (the largest), balanced, or ttft
    max_ttft: Annotated[float | None, option("SECONDS")] = None  # the longest that a first token may take
    seconds: float = 120.0  # time to spend, loading included
    threads: Annotated[int | None, option("N")] = None  # CPU threads; unset: as many as the backend finds useful
    device: str = "cpu"  # cpu, cuda, cuda:1, ...
    out: Annotated[Path, OUT] = Path("tuned.toml")  # the profile
    check: Annotated[Path | None, option("FILE")] = None  # measure a profile's choice again instead, and say its drift
    plot: Annotated[Path | None, option("FILE.png")] = None  # predicted against measured, as PNG
    json: Annotated[bool, option()] = False  # one JSON object instead of tables


def run(argv: Seq[str], prog: str) -> int:
    """Parse, measure, write; exit code 1 if a text differed from plain decoding's."""
    args = parse(TuneArgs, argv, prog).args
    from sameseed.plan.profile_file import write
    from sameseed.plan.tune import as_tuned, tune
    from sameseed.study import record
    from sameseed.tuned import Tuned

    before = None if args.check is None else Tuned.read(args.check)
    asked = _asked(args if before is None else _again(args, before))
    for path, flag in ((args.out, "-o"), *(((args.plot, "--plot"),) if args.plot else ())):
        record.prepare(path, flag)
    from sameseed.cli.console import load_llm, stages

    def load(model: str, draft: Any, **given: Any) -> Any:
        return load_llm(EngineChoice(model, given | {"draft": draft}), quiet=True)

    with stages(f"tuning {args.model}", args.json) as tell:
        found = tune(asked, load, tell)
    made = as_tuned(found)
    if before is None:
        write(made, args.out)
    if args.plot is not None:
        from sameseed.plan.picture import draw

        draw(found, args.plot)
    if args.json:
        from dataclasses import asdict

        print(json.dumps({**asdict(made), "seconds": found.seconds}))
    else:
        _show(found, made, args, before)
    return 1 if found.differing else 0


def _asked(args: TuneArgs) -> TuneRequest:
    from sameseed.plan.candidates import TuneRequest
    from sameseed.study.workload import DEFAULT_PROMPTS, read_prompts

    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    drafts = args.drafts or _usual(args.model)
    for text in drafts:
        draft_choice(text, args.model)  # a bad one fails here, with the nearest name
    settings = {"threads": args.threads, "device": args.device}
    return TuneRequest(
        args.model,
        tuple(read_prompts(args.prompts or DEFAULT_PROMPTS, args.num_prompts)),
        params,
        drafts,
        args.formats,
        args.kv_formats,
        args.draft_formats,
        args.batches,
        args.objective,
        args.max_ttft,
        args.seconds,
        {name: value for name, value in settings.items() if value is not None},
    )


def _usual(model: str) -> tuple[str, ...]:
    """All drafters that need no model; for the embedded target its draft, and its head after one of them."""
    classes = {name: registry.load("drafters", name).DRAFTER for name in registry.names("drafters")}
    alone = [name for name, cls in classes.items() if not cls.owns and cls.num_below == (0, 0)]
    return (*alone, EMBEDDED_DRAFT, f"{alone[-1]} + {EMBEDDED_HEAD}") if model in EMBEDDED else tuple(alone)


def _again(args: TuneArgs, before: Tuned) -> TuneArgs:
    """The arguments that measure what a profile chose."""
    c = before.chosen
    if c.draft in (None, "none"):
        raise ConfigError(f"{args.check} chose plain decoding: there is nothing to check; tune again")
    return replace(
        args,
        drafts=(str(c.draft),),
        formats=(c.format or "auto",),
        kv_formats=(c.kv_format or "auto",),
        draft_formats=(c.draft_format or "auto",),
        batches=before.scope.batch or args.batches,
        temperature=before.scope.temperature[0] if before.scope.temperature else args.temperature,
    )


def _show(found: TuneOutcome, made: Tuned, args: TuneArgs, before: Tuned | None) -> None:
    from rich.console import Console

    from sameseed.cli.console import show_table

    console = Console(highlight=False)
    show_table(_table(found))
    best, asked = found.best, found.asked
    over = found.speedup(best)
    sizes = ", ".join(map(str, asked.looked_at))
    if best.plain:
        console.print(f"[bold]Plain decoding is the fastest here[/] (batch {sizes}): none of the drafts pays.")
    else:
        label = best.prospect.candidate.label
        console.print(
            f"[bold]{label}[/]: {over.value:.2f}x plain decoding, 80 % interval {over.low:.2f} to {over.high:.2f} "
            f"(batch {sizes})"
        )
    for what, why in found.lost:
        console.print(f"not tried: {what}: {why}", style="dim", markup=False)
    if found.differing:
        console.print(f"[red]texts differ from plain decoding's[/]: {', '.join(found.differing)}; please report this")
    if before is not None:
        for name, old in before.measured.items():
            if name in made.measured and name.startswith("speedup"):
                new = made.measured[name]
                console.print(f"{name}: {old.value:.2f} then, {new.value:.2f} now ({new.value / old.value - 1:+.0%})")
        return
    console.print(f"{len(found.prospects)} settings simulated, {len(found.order)} ran, {found.seconds:.0f} s")
    console.print(f"written: {args.out}; use it: sameseed serve --profile {args.out}", style="dim", markup=False)


def _table(found: TuneOutcome) -> Table:
    """Who ran, the best first: predicted and measured speed-up at each batch size."""
    from rich.table import Table

    batches = found.asked.batches
    table = Table(
        title="speed over plain decoding (80 % intervals), in turns", title_justify="left", title_style="bold"
    )
    table.add_column("setting")
    for b in batches:
        table.add_column(f"predicted, batch {b}", justify="right")
        table.add_column(f"measured, batch {b}", justify="right")
    table.add_column("prompts", justify="right")
    for c in found.order:
        cells = []
        for b in batches:
            p, m = found.predicted(c.prospect, b), found.speedup(c, b)
            cells += [f"{p.value:.2f}", f"{m.value:.2f} ({m.low:.2f}-{m.high:.2f})"]
        table.add_row(c.prospect.candidate.label, *cells, str(c.out_at or len(found.asked.prompts)))
    return table
