"""`sameseed tune`: find the draft, formats and lengths that are fastest here, for these texts; write them to a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial

from rich.table import Table

from sameseed import registry
from sameseed.cli.console import check_outputs, load_llm, show_table, stages, stdout_console
from sameseed.cli.flags import TuneArgs
from sameseed.cli.options import Parsed, companion, draft_choice, numbers, shipped, unread
from sameseed.measure.quality.data import text_of
from sameseed.measure.workload import DEFAULT_PROMPTS, read_prompts
from sameseed.plan.grid import TuneRequest, parse_slo
from sameseed.plan.picture import draw
from sameseed.plan.profile_file import write
from sameseed.plan.tune import TuneOutcome, again, as_tuned, reasons, tune
from sameseed.report import table as layout
from sameseed.request import SamplingParams
from sameseed.tuned import Tuned

load = partial(load_llm, quiet=True)


def run(parsed: Parsed[TuneArgs]) -> int:
    """Measure, write; exit code 1 if an output differed from plain decoding's."""
    args = parsed.args
    if args.engine == "vllm":
        return int(companion("vllm").tune(args))
    unread(args, ("url", "cost", "api_key_file"), "it is for --engine vllm; sameseed's own engine is started here")
    if args.check is not None:
        unread(args, ("drafts", "draft_formats", "draft_vocabularies", "threads"), "--check measures what it chose")
    before = None if args.check is None else Tuned.read(args.check)
    asked = requested(args) if before is None else again(requested(args), before)
    check_outputs((args.out if before is None else None, "-o"), plot=args.plot)
    with stages(f"tuning {args.model}", args.json) as tell:
        found = tune(asked, load, tell)
    made = as_tuned(found)
    if before is None:
        write(made, args.out)
    if args.plot is not None:
        draw(found, args.plot)
    if args.json:
        print(json.dumps({**asdict(made), "seconds": found.seconds}))
    else:
        show(found, made, before)
        if before is None:
            said = f"written: {args.out}; use it: sameseed serve --profile {args.out}"
            stdout_console().print(said, style="dim", markup=False)
    return 1 if found.differing else 0


def requested(args: TuneArgs) -> TuneRequest:
    """What to tune. Raises ConfigError, RegistryError."""
    drafts = args.drafts or _usual(args.model)
    for text in drafts:
        draft_choice(text, args.model)  # a bad one fails here, with the nearest name
    names = ("formats", "kv_formats", "draft_formats", "draft_vocabularies", "objective", "quality", "quality_tokens")
    return TuneRequest(
        args.model,
        tuple(read_prompts(args.prompts or DEFAULT_PROMPTS, args.num_prompts)),
        SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed),
        drafts,
        batches=numbers("batch", args.batch),
        threads=tuple(sorted(numbers("threads", args.threads), reverse=True)) or (None,),
        slo=parse_slo(args.slo),
        quality_text="" if args.quality_text is None else text_of(args.quality_text),
        seconds=args.seconds,
        settings={"device": args.device},
        **{name: getattr(args, name) for name in names},
    )


def _usual(model: str) -> tuple[str, ...]:
    """All drafters that need no model, and the target's own: its draft, and its head after a lookup."""
    classes = {name: module.DRAFTER for name, module in registry.loaded("drafters").items()}
    alone = [name for name, cls in classes.items() if not cls.owns and cls.num_below == (0, 0)]
    auto, own = shipped(model)
    mine = [auto, *(f"{alone[-1]} + {name}" for kind, name in own.items() if kind == "head")]
    return tuple(dict.fromkeys(d for d in (*alone, *mine) if d != "none"))


def show(found: TuneOutcome, made: Tuned, before: Tuned | None = None) -> None:
    """Show what ran, the best of it, and what lost; or, beside an earlier profile, the drift."""
    console = stdout_console()
    show_table(_table(found))
    best, over, sizes = found.best, found.speedup(found.best), ", ".join(map(str, found.asked.looked_at))
    if best.setting == found.plain.setting:
        console.print(f"[bold]Plain decoding is the best here[/] (batch {sizes}): none of the drafts pays.")
    else:
        said = f"{over.value:.2f}x plain decoding, 80 % interval {over.low:.2f} to {over.high:.2f} (batch {sizes})"
        console.print(f"[bold]{best.label}[/]: {said}")
    if found.missed:
        console.print(f"[red]no setting keeps --slo[/]: the best has {found.missed}; allow more, or lower --batch")
    if found.differing:
        console.print(f"[red]outputs differ from plain decoding's[/]: {', '.join(found.differing)}; please report this")
    if before is not None:
        for name in (n for n in before.measured if n in made.measured and n.startswith("speedup")):
            old, new = before.measured[name], made.measured[name]
            console.print(f"{name}: {old.value:.2f} then, {new.value:.2f} now ({new.value / old.value - 1:+.0%})")
        return
    console.print("\n".join(f"{k}: {v} ({why})" for k, v, why in reasons(found)), markup=False, soft_wrap=True)
    show_table(_lost(made))
    console.print(f"{len(found.prospects)} settings predicted, {len(found.order)} ran, {found.seconds:.0f} s")


def _lost(made: Tuned) -> Table:
    """Table of what lost, and why: all that could not be tried, and the best of those that ran or were ruled out."""
    rows: list[tuple[str, str, str]] = []
    for why in dict.fromkeys(x.why for x in made.rejected):
        group = sorted((x for x in made.rejected if x.why == why), key=lambda x: -(x.speed or 0.0))
        shown = group if group[0].speed is None else group[:8]  # the best of those that lost for one reason
        for x in shown:
            speed = "" if x.speed is None else f"{x.speed:.2f}"
            speed += "" if x.low is None else f" ({x.low:.2f}-{x.high:.2f})"
            rows.append((str(x.settings["setting"]), f"{why}: {x.note}" if x.note else why, speed))
        if len(shown) < len(group):
            rows.append((f"and {len(group) - len(shown)} more", f"{why}: they are in the profile", ""))
    return layout.table("what lost", ("setting", "why", "speed"), rows, left=(0, 1))


def _table(found: TuneOutcome) -> Table:
    batches, rows = found.asked.batches, []
    heads = [f"{what}, batch {b}" for b in batches for what in ("predicted", "measured")]
    for c in found.order:
        pairs = [(c.over(found.plain, b), found.speedup(c, b)) for b in batches]
        cells = [x for p, m in pairs for x in (f"{p.value:.2f}", f"{m.value:.2f} ({m.low:.2f}-{m.high:.2f})")]
        rows.append((c.label, *cells, str(c.out_at or len(found.asked.prompts))))
    title = "speed over plain decoding (80 % intervals), interleaved"
    return layout.table(title, ("setting", *heads, "prompts"), rows)
