"""`sameseed eval`: a model's quality; with --compare, how number formats differ in quality, speed and memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from sameseed.cli.console import check_outputs, keep, load_llm, note, stages, stdout_console
from sameseed.cli.flags import EvalArgs
from sameseed.cli.options import EngineChoice, Parsed, draft_choice, unread, words
from sameseed.errors import ConfigError
from sameseed.measure.quality import compare, show, tasks
from sameseed.measure.quality.compare import Comparing
from sameseed.measure.quality.show import Variant
from sameseed.measure.quality.tasks import EvalSettings
from sameseed.measure.workload import DEFAULT_PROMPTS, stored
from sameseed.models.loader import resolve_model

# Flags that are fields of EvalSettings by the same name.
SAME = tuple(f.name for f in fields(EvalSettings) if f.name != "tasks")
SPECULATION = ("draft_options", "draft_format", "confidence", "policy", "overlap")  # of a draft, besides its length
KINDS = ("warnings", "notes")  # what a comparison says of a variant
OF_VARIANTS = ("draft", "num_draft_tokens", "format", "kv_format", *SPECULATION)  # not shared by a comparison's engines


def run(parsed: Parsed[EvalArgs]) -> int:
    """Check, measure, show and write; exit code 1 where a variant failed in measuring."""
    args, engine = parsed.args, parsed.engine
    if args.name is not None and args.compare:
        raise ConfigError("give the models to --compare, and no other")
    if (args.name or args.compare) and engine.model != "embedded" and engine.settings["profile"] is None:
        raise ConfigError(f"leave out --model {engine.model}: {args.name or '--compare'} names what is evaluated")
    asked = EvalSettings(words(args.tasks), **{name: getattr(args, name) for name in SAME})
    check_outputs((args.out, "--out"))
    if args.compare:
        return _compare(args, _comparing(args, engine, asked))
    unread(args, ("prompts", "num_prompts", "repeat", "plot"), "it is of comparisons; give the variants with --compare")
    model = args.name or engine.model
    resolve_model(model)
    tasks.check(asked)
    llm = load_llm(model, draft_choice(args.draft, model), quiet=args.json, **engine.settings)
    variant = Variant(model, llm.config.format, llm.config.cache.format)
    with stages("evaluating", args.json) as tick:
        quality = tasks.evaluate(llm, asked, tick)
    config = stored(llm.engine.runner.model, llm.config.format, llm.engine.runner.cache.format)
    found = show.make_record(variant, asked, quality, config)
    keep([found], args.out, args.json, show.quality(found))
    if not args.json:
        _say_where(args.out, show.notes(found))
    return 0


def _comparing(args: EvalArgs, engine: EngineChoice, asked: EvalSettings) -> Comparing:
    if engine.settings.get("format", "auto") != "auto" or engine.settings.get("kv_format", "auto") != "auto":
        raise ConfigError("with --compare each variant names its formats: MODEL@FORMAT@KVFORMAT")
    check_outputs(plot=args.plot)
    if args.draft == "none":
        raise ConfigError("a comparison measures acceptance: give a draft, or leave --draft out")
    return compare.Comparing(
        quality=asked if asked.tokens is not None else replace(asked, tokens=compare.COMPARE_TOKENS),
        draft=None if args.draft == "auto" else draft_choice(args.draft, Variant.parse(args.compare[0]).model),
        num_draft_tokens=engine.settings["num_draft_tokens"],
        speculation={name: engine.settings[name] for name in SPECULATION},
        prompts=args.prompts or DEFAULT_PROMPTS,
        num_prompts=args.num_prompts,
        repeat=args.repeat,
        engine={k: v for k, v in engine.settings.items() if k not in OF_VARIANTS},
    )


def _compare(args: EvalArgs, asked: Comparing) -> int:
    """Compare variants, append records to `--out` (quality at once, then all), and show the result."""
    done = list[dict[str, Any]]()

    def keep_quality(variant: Any, quality: Any) -> None:
        done.append(show.make_record(variant, asked.quality, quality, {}))
        keep(done[-1:], args.out, as_json=False)  # at once: the next step may be killed

    with stages("evaluating", args.json) as tick:
        try:
            compared = compare.report(args.compare, asked, tick, partial(note, style="yellow"), keep_quality)
        except BaseException:  # the baseline failed, or Ctrl-C
            keep(done, None, args.json)
            raise
    found = compared.records
    keep(found, args.out, args.json, *show.comparison(found, stdout_console().width))
    keep([r for r in done if r["config"]["label"] in compared.failed], None, args.json)
    for label, why in compared.failed.items():
        note(f"failed: {label}: {why}", style="bold red")
    lines = {kind: [f"{r['config']['label']}: {x}" for r in found for x in r["comparison"][kind]] for kind in KINDS}
    for warning in lines["warnings"]:
        note(f"WARNING: {warning}", style="bold red")
    pages = [] if args.plot is None else show.plot(found, args.plot)
    if not args.json:
        _say_where(args.out, sorted({*lines["notes"]}.union(*map(show.notes, found))))
        for text in (show.LEGEND, *([f"written: {', '.join(map(str, pages))}"] if pages else ())):
            note(text)
    return 1 if compared.failed else 0


def _say_where(out: Path | None, notes: Iterable[str]) -> None:
    for text in [*([] if out is None else [f"records appended to {out}"]), *(f"note: {text}" for text in notes)]:
        note(text)
