"""`sameseed eval`: what a model gets right; with --compare, what number formats cost and what they buy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from sameseed.cli.options import EngineChoice, draft_choice, option, parse
from sameseed.cli.profile import words
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from sameseed.study.quality.compare import Comparing, Comparison
    from sameseed.study.quality.suite import PerplexityText
    from sameseed.study.quality.tasks import TaskSettings

SPECULATION = ("draft_options", "draft_format", "confidence", "policy", "overlap")  # of a draft, beside its length
OF_VARIANTS = ("draft", "num_draft_tokens", "format", "kv_format", *SPECULATION)  # not of every engine of a comparison


@dataclass(frozen=True)
class EvalArgs:
    """Measure quality: perplexity by the published protocol, and tasks, each with its 95 % interval.

    --compare measures several models or formats side by side, MODEL[@FORMAT[@KVFORMAT]] each, the first being the
    baseline: quality, size, memory, speed, and acceptance of drafts. Tasks: perplexity, humaneval, gsm8k, mmlu_pro,
    mmlu_pro_likelihood. HumanEval runs the model's code, in a process with limits.
    """

    name: Annotated[str | None, Positional, option("[MODEL]")] = None  # the model, as --model
    tasks: str = "perplexity"  # with commas between
    data: Annotated[Path | None, option("DIR")] = None  # folder of the data sets; unset: from the hub
    text: Annotated[Path | None, option("FILE")] = None  # perplexity of another text (.txt, or .jsonl with "text")
    window: int = 2048  # tokens that one pass sees; clipped to the model's context
    stride: int = 512  # tokens by which the window moves; each token is scored once
    tokens: Annotated[int | None, option("N")] = None  # read N tokens of the text; unset: all (--compare: 32768)
    limit: Annotated[int | None, option("N")] = None  # ask N questions of each task, spread over it; unset: all
    chat: Annotated[bool, option()] = False  # put prompts into the model's chat template
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # sample from the likeliest tokens that make up this probability
    max_tokens: Annotated[int | None, option("N")] = None  # longest answer; unset: each task's own
    seed: int = 0  # of sampled answers and of the intervals
    draft: str = "auto"  # as generate's --draft; with --compare, auto is the embedded draft where it fits, else ngram
    compare: Annotated[tuple[str, ...], option("MODEL[@FORMAT[@KV]]")] = ()  # variants, the first is the baseline
    prompts: Annotated[Path | None, option("FILE")] = None  # --compare: what is written; unset: the embedded prompts
    num_prompts: int = 12  # --compare: prompts to take, spread over the file
    repeat: int = 3  # --compare: runs of each
    no_advice: Annotated[bool, option()] = False  # --compare: do not measure which parts should keep more bits
    plot: Annotated[Path | None, option("FILE.png")] = None  # --compare: draw FILE-quality.png and FILE-cost.png
    out: Annotated[Path | None, option("FILE")] = None  # append records here; unset: benchmarks/results/, if it exists
    json: Annotated[bool, option()] = False  # records to stdout as JSON lines instead of tables


def run(argv: Seq[str], prog: str) -> int:
    """Check, measure, show and write."""
    parsed = parse(EvalArgs, argv, prog, engine=True, left_out=("draft",))  # which means another thing for variants
    args, engine = parsed.args, parsed.engine
    if args.name is not None:
        if args.compare:
            raise ConfigError("give the models to --compare, and no other")
        engine = EngineChoice(args.name, engine.settings)
    engine = EngineChoice(engine.model, engine.settings | {"draft": draft_choice(args.draft, engine.model)})
    from sameseed.study import record
    from sameseed.study.quality import suite
    from sameseed.study.quality.tasks import TaskSettings

    settings = TaskSettings(args.data, args.limit, args.chat, args.temperature, args.top_p, args.max_tokens, args.seed)
    settings.params(1, ())  # a bad value fails here
    text = suite.PerplexityText(args.text, args.window, args.stride, args.tokens)
    out = record.destination(args.out, "eval")
    if args.compare:
        return _compare(args, engine, settings, text, out)
    if args.plot is not None:
        raise ConfigError("--plot draws comparisons; give the variants with --compare")
    return _evaluate(args, engine, settings, text, out)


def _evaluate(
    args: EvalArgs, engine: EngineChoice, settings: TaskSettings, text: PerplexityText, out: Path | None
) -> int:
    """One model."""
    from sameseed.cli.console import load_llm, stderr_console
    from sameseed.study.quality import records, suite, tables
    from sameseed.study.quality.variant import Variant

    tasks = words(args.tasks)
    suite.check(tasks, settings, text)
    llm = load_llm(engine, args.json)
    variant = Variant(engine.model, llm.config.format, llm.config.cache.format)
    with _progress(args.json) as report:
        quality = suite.evaluate(llm, tasks, settings, text, report)
    found = records.of_model(llm, variant, tasks, settings, text, quality)
    _write([found], out, args.json)
    if not args.json:
        _console().print(tables.quality(found))
        for note in tables.notes(found):
            stderr_console().print(f"note: {note}", style="dim")
    return 0


def _compare(
    args: EvalArgs, engine: EngineChoice, settings: TaskSettings, text: PerplexityText, out: Path | None
) -> int:
    """Several variants."""
    from sameseed.study.quality import compare
    from sameseed.study.quality.variant import Variant
    from sameseed.study.workload import DEFAULT_PROMPTS

    if engine.settings.get("format", "auto") != "auto" or engine.settings.get("kv_format", "auto") != "auto":
        raise ConfigError("with --compare each variant names its formats: MODEL@FORMAT@KVFORMAT")
    check_plot(args.plot)
    if args.repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, got {args.repeat}")
    if text.tokens is None:
        text = replace(text, tokens=compare.COMPARE_TOKENS)
    variants = [Variant.parse(v) for v in args.compare]
    draft = None if args.draft == "auto" else draft_choice(args.draft, variants[0].model)
    if args.draft == "none":
        raise ConfigError("a comparison measures acceptance: give a draft, or leave --draft out")
    asked = compare.Comparing(
        tasks=words(args.tasks),
        settings=settings,
        text=text,
        draft=draft,
        num_draft_tokens=engine.settings["num_draft_tokens"],
        speculation={name: engine.settings[name] for name in SPECULATION},
        prompts=args.prompts or DEFAULT_PROMPTS,
        num_prompts=args.num_prompts,
        repeat=args.repeat,
        advise=not args.no_advice,
        engine={k: v for k, v in engine.settings.items() if k not in OF_VARIANTS},
    )
    report(variants, asked, out, args.json, args.plot)
    return 0


def check_plot(plot: Path | None) -> None:
    """Raise ConfigError, before anything is measured, if the pages could not be drawn."""
    if plot is None:
        return
    from sameseed.study import record
    from sameseed.study.quality.plots import plot_paths

    for path in plot_paths(plot):
        record.prepare(path, "--plot")


def compared(models: Seq[str], asked: Comparing, as_json: bool, plot: Path | None) -> None:
    """`quantize --report`: compare, append the records, and show."""
    from sameseed.study import record
    from sameseed.study.quality.variant import Variant

    report([Variant(m) for m in models], asked, record.destination(None, "eval"), as_json, plot)


def report(
    variants: Seq[Any], asked: Comparing, out: Path | None, as_json: bool = False, plot: Path | None = None
) -> Comparison:
    """Compare variants under a progress bar, append the records to `out`, and show the result.

    `as_json` prints the records instead, and the warnings.
    """
    from sameseed.study.quality import compare, records

    with _progress(as_json) as tick:
        found = compare.report(variants, asked, tick)
    _write(records.of_comparison(found), out, as_json)  # first: nothing that goes wrong from here on loses them
    _show(found, as_json, plot)
    return found


def _show(found: Comparison, quiet: bool, plot: Path | None) -> None:
    """Tables, warnings, and the pages; `quiet` prints nothing but warnings."""
    from sameseed.study.quality import tables

    console = _console()
    warnings, advice, notes = tables.said(found)
    if not quiet:
        for table in tables.comparison(found, console.width):
            console.print(table)
        for line in advice:
            console.print(line, soft_wrap=True)
    errors = _console(stderr=True)
    for line in warnings:
        errors.print(f"WARNING: {line}", style="bold red", soft_wrap=True)
    if not quiet:
        for line in [*notes, tables.LEGEND]:
            errors.print(f"note: {line}" if line != tables.LEGEND else line, style="dim")
    if plot is not None:
        from sameseed.study.quality.plots import plot as draw

        pages = draw(found, plot)
        if not quiet:
            errors.print(f"written: {', '.join(map(str, pages))}", style="dim")


def _console(stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that shows the stage at hand."""
    from sameseed.cli.console import progress

    with progress("evaluating", quiet) as bar:

        def report(stage: str, done: int, total: int) -> None:
            bar.update(bar.tasks[0].id, description=stage, completed=done, total=total)

        yield report


def _write(found: Seq[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    from sameseed.study import record

    for line in found:
        if out is not None:
            record.append(out, line)
        if as_json:
            print(json.dumps(line), flush=True)
    if out is not None and not as_json:
        print(f"records appended to {out}", file=sys.stderr)
