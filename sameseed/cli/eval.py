"""`sameseed eval`: a model's quality; with --compare, how number formats differ in quality, speed and memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from sameseed.cli.options import FIXED, EngineChoice, draft_choice, option, parse
from sameseed.cli.profile import words
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from sameseed.measure.quality.compare import Comparing
    from sameseed.measure.quality.suite import PerplexityText
    from sameseed.measure.quality.tasks import TaskSettings

SPECULATION = ("draft_options", "draft_format", "confidence", "policy", "overlap")  # of a draft, besides its length
OF_VARIANTS = ("draft", "num_draft_tokens", "format", "kv_format", *SPECULATION)  # not shared by a comparison's engines


@dataclass(frozen=True)
class EvalArgs:
    """Measure quality: perplexity by the published protocol, and tasks, each with its 95 % interval.

    --compare measures several models or formats side by side, MODEL[@FORMAT[@KVFORMAT]] each, the first being the
    baseline: quality, size, speed, and acceptance of drafts. Tasks: perplexity, humaneval, gsm8k, mmlu_pro.
    HumanEval runs the model's code, in a process with limits.
    """

    name: Annotated[str | None, Positional, option("[MODEL]")] = None  # the model, as --model
    tasks: str = "perplexity"  # comma-separated
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
    prompts: Annotated[Path | None, option("FILE")] = None  # --compare: prompts to continue; unset: the embedded ones
    num_prompts: int = 12  # --compare: prompts to take, spread over the file
    repeat: int = 3  # --compare: runs of each variant
    plot: Annotated[Path | None, option("FILE.png")] = None  # --compare: draw the figures, as PNG and SVG
    out: Annotated[Path | None, option("FILE")] = None  # append records here; unset: benchmarks/results/, if it exists
    json: Annotated[bool, option()] = False  # records to stdout as JSON lines instead of tables


def run(argv: Seq[str], prog: str) -> int:
    """Check, measure, show and write."""
    # --draft has another meaning with --compare, so it is not among the engine's flags.
    parsed = parse(EvalArgs, argv, prog, engine=True, defaults=FIXED, left_out=("draft",))
    args, engine = parsed.args, parsed.engine
    if args.name is not None:
        if args.compare:
            raise ConfigError("give the models to --compare, and no other")
        engine = EngineChoice(args.name, engine.settings)
    from sameseed.measure.quality import suite
    from sameseed.measure.quality.tasks import TaskSettings
    from sameseed.report import record

    settings = TaskSettings(args.data, args.limit, args.chat, args.temperature, args.top_p, args.max_tokens, args.seed)
    settings.params(1, ())  # a bad value fails here
    text = suite.PerplexityText(args.text, args.window, args.stride, args.tokens)
    out = record.destination(args.out, "eval")
    if args.compare:
        return report(args.compare, _comparing(args, engine, settings, text), out, args.json, args.plot)
    if args.plot is not None:
        raise ConfigError("--plot draws comparisons; give the variants with --compare")
    engine = EngineChoice(engine.model, engine.settings | {"draft": draft_choice(args.draft, engine.model)})
    _evaluate(args, engine, settings, text, out)
    return 0


def _evaluate(
    args: EvalArgs, engine: EngineChoice, settings: TaskSettings, text: PerplexityText, out: Path | None
) -> None:
    """One model's tasks: measured, shown, written."""
    from sameseed.cli.console import load_llm, show_table, stages, stderr_console
    from sameseed.measure.quality import show, suite
    from sameseed.measure.quality.variant import Variant, stored

    tasks = words(args.tasks)
    suite.check(tasks, settings, text)
    llm = load_llm(engine, args.json)
    variant = Variant(engine.model, llm.config.format, llm.config.cache.format)
    with stages("evaluating", args.json) as tick:
        quality = suite.evaluate(llm, tasks, settings, text, tick)
    config = {"num_parameters": llm.engine.runner.model.config.num_parameters, **stored(llm)}
    found = show.make_record(variant, tasks, settings, text, quality, config)
    _write([found], out, args.json)
    if not args.json:
        show_table(show.quality(found))
        for note in show.notes(found):
            stderr_console().print(f"note: {note}", style="dim")


def _comparing(args: EvalArgs, engine: EngineChoice, settings: TaskSettings, text: PerplexityText) -> Comparing:
    """The settings of a comparison of variants. Raises ConfigError."""
    from sameseed.cli.console import check_outputs
    from sameseed.measure.quality import compare
    from sameseed.measure.quality.variant import Variant
    from sameseed.measure.workload import DEFAULT_PROMPTS

    if engine.settings.get("format", "auto") != "auto" or engine.settings.get("kv_format", "auto") != "auto":
        raise ConfigError("with --compare each variant names its formats: MODEL@FORMAT@KVFORMAT")
    check_outputs(plot=args.plot)
    if args.repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, got {args.repeat}")
    if args.draft == "none":
        raise ConfigError("a comparison measures acceptance: give a draft, or leave --draft out")
    return compare.Comparing(
        tasks=words(args.tasks),
        settings=settings,
        text=text if text.tokens is not None else replace(text, tokens=compare.COMPARE_TOKENS),
        draft=None if args.draft == "auto" else draft_choice(args.draft, Variant.parse(args.compare[0]).model),
        num_draft_tokens=engine.settings["num_draft_tokens"],
        speculation={name: engine.settings[name] for name in SPECULATION},
        prompts=args.prompts or DEFAULT_PROMPTS,
        num_prompts=args.num_prompts,
        repeat=args.repeat,
        engine={k: v for k, v in engine.settings.items() if k not in OF_VARIANTS},
    )


def report(variants: Seq[Any], asked: Comparing, out: Path | None, as_json: bool, plot: Path | None) -> int:
    """Compare variants under a progress bar, append records to `out` (quality at once, then all), and show the result.

    `as_json` prints the comparison's records instead, and the warnings. Returns 1 where a variant failed in measuring.
    """
    from sameseed.cli.console import keep as write, show_table, stages, stderr_console, stdout_console
    from sameseed.measure.quality import compare, show

    console, errors, done = stdout_console(), stderr_console(), list[dict[str, Any]]()
    tell = partial(errors.print, style="yellow", markup=False, soft_wrap=True)

    def keep(variant: Any, quality: Any) -> None:
        done.append(show.make_record(variant, asked.tasks, asked.settings, asked.text, quality, {}))
        write(done[-1:], out, as_json=False)  # at once: the next step may be killed

    with stages("evaluating", as_json) as tick:
        try:
            compared = compare.report(variants, asked, tick, tell, keep)
        except BaseException:  # the baseline failed, or Ctrl-C
            write(done, None, as_json)
            raise
    found = compared.records
    _write(found, out, as_json)
    write((r for r in done if r["config"]["label"] in compared.failed), None, as_json)
    told = [(r["config"]["label"], r["comparison"]) for r in found]
    for label, why in compared.failed.items():
        errors.print(f"failed: {label}: {why}", style="bold red", markup=False, soft_wrap=True)
    if not as_json:
        for table in show.comparison(found, console.width):
            show_table(table)
    for label, warning in ((label, line) for label, c in told for line in c["warnings"]):
        errors.print(f"WARNING: {label}: {warning}", style="bold red", soft_wrap=True)
    if not as_json:
        notes = {f"{label}: {line}" for label, c in told for line in c["notes"]}
        for note in sorted(notes.union(*map(show.notes, found))):
            errors.print(f"note: {note}", style="dim")
        errors.print(show.LEGEND, style="dim")
    if plot is not None:
        from sameseed.measure.quality.show import plot as draw

        pages = draw(found, plot)
        if not as_json:
            errors.print(f"written: {', '.join(map(str, pages))}", style="dim")
    return 1 if compared.failed else 0


def _write(found: Seq[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    from sameseed.cli.console import keep

    keep(found, out, as_json)
    if out is not None and not as_json:
        print(f"records appended to {out}", file=sys.stderr)
