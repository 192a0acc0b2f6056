"""`sameseed bench`: prompts x settings, speculative and plain decoding interleaved; one record per measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from sameseed.cli.console import check_outputs, keep, load_llm, note, progress, stdout_console
from sameseed.cli.flags import BenchArgs
from sameseed.cli.options import EngineChoice, Parsed, draft_choice
from sameseed.config import SpecConfig, draft_text
from sameseed.engine.build import check_parts
from sameseed.engine.levels import Level, resolve
from sameseed.engine.memory import plan_blocks
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError, SameseedError, VocabularyError
from sameseed.measure import bench_report as report
from sameseed.measure.bench import Bench, BenchStopped, fitted, fitting
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.workload import DEFAULT_PROMPTS, arms, check_batches, prompts_name, read_prompts
from sameseed.models.loader import read_config, resolve_model
from sameseed.report import record
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme

OF_DRAFTS = ("draft_options", "policy")  # flags of the drafts, not of the target
SHORT = 60.0  # seconds that need no announcement


def run(parsed: Parsed[BenchArgs]) -> int:
    """Measure, write; exit code 1 if an output differed from plain decoding's."""
    args, engine = parsed.args, parsed.engine
    check_outputs((args.out, "--out"), plot=args.plot)
    for temperature in args.temperatures:
        replace(parsed.params, temperature=temperature)  # checks it before anything is measured
    prompts = read_prompts(args.prompts or DEFAULT_PROMPTS, args.num_prompts)
    grid = _possible(args, engine)
    prompts = fitting(resolve_model(engine.model), engine.settings, prompts, _left_out)
    check_batches(args.batch_sizes, len(prompts))
    run_id, found, failed = record.now(), list[dict[str, Any]](), False
    for number_format, specs in grid.items():
        ahead = 0 if found else len(grid)  # the total time is estimated once
        try:
            for records in _measured(parsed, number_format, specs, prompts, run_id, ahead):
                keep(records, args.out, args.json, report.table(records))
                found += records
                for text in () if args.json else (text for r in records for text in report.levels(r)):
                    stdout_console().print(text, style="dim", markup=False)
        except SameseedError as error:  # what was measured is written; the other formats are still to measure
            failed = True
            note(f"failed: target in {number_format}: {error}", style="red")
    written = [] if args.out is None else [f"records appended to {args.out}"]
    if args.plot is not None and found:
        written += [f"written: {path}" for path in report.plot_speedups(found, args.plot)]
    for text in [] if args.json else [report.LEGEND, *written]:
        note(text)
    return 0 if all(r["equals_plain"] for r in found) and not failed else 1


def _left_out(text: str) -> None:
    note(f"left out: {text}", style="yellow")


def _measured(
    parsed: Parsed[BenchArgs], number_format: str, specs: Seq[SpecConfig], prompts: Seq[Prompt], run_id: str, ahead: int
) -> Iterator[list[dict[str, Any]]]:
    """Load the target and measure all workloads; yields the records of each.

    `ahead`: targets still to measure, this one included, for an estimate of the time; 0: no estimate.
    """
    args, engine = parsed.args, parsed.engine
    settings = fitted(engine.model, _of_target(args, engine, number_format), prompts, parsed.params.max_tokens)
    bench = Bench(engine.model, arms(specs, args.ks), settings, partial(load_llm, quiet=args.json))
    name, here = prompts_name(args.prompts or DEFAULT_PROMPTS), record.machine()
    for temperature, size in product(args.temperatures, args.batch_sizes):
        params: SamplingParams = replace(parsed.params, temperature=temperature)
        workload = bench.workload(name, prompts, params, size)
        rounds = args.repeat * -(-len(workload.prompts) // size)
        with progress(f"{report.chosen(params)}, batch {size}", args.json) as (update, say):
            update(total=rounds * len(bench.arms), note="warm-up")
            seconds = bench.warm_up(workload) * rounds * ahead * len(args.temperatures) * len(args.batch_sizes)
            if seconds > SHORT:
                say(f"about {seconds / 60:.0f} minutes for all, as the first tokens were; Ctrl-C ends it")
            ahead, stopped = 0, None
            try:
                runs = bench.measure(workload, args.repeat, lambda label: update(advance=1, note=label))
            except BenchStopped as stop:
                runs, stopped = stop.runs, stop
        yield report.make_records(bench, engine.model, workload, runs, run_id, here)
        if stopped is not None:
            raise stopped


def _possible(args: BenchArgs, engine: EngineChoice) -> dict[str, list[SpecConfig]]:
    """The drafts that can run, by the target's format; the others are named on stderr with the reason.

    Nothing is loaded. Raises ConfigError or RegistryError for a misspelt name, and the first reason if none can run.
    """
    specs = _specs(args, engine)
    for name in args.formats:
        QuantScheme.parse(name)
    folder = resolve_model(engine.model)
    longest = engine.settings["max_model_len"] or read_config(folder).max_model_len
    grid, wrong = dict[str, list[SpecConfig]](), list[SameseedError]()
    for number_format, spec in product(args.formats, specs):
        try:
            config = make_config(spec, **_of_target(args, engine, number_format))
            plan_blocks(config, longest, check_parts(folder, config).demands)
            grid.setdefault(number_format, []).append(spec)
        except (ConfigError, VocabularyError) as error:
            wrong.append(error)
            _left_out(f"{draft_text(spec)}, target in {number_format}: {error}")
    if not grid:
        raise wrong[0]
    return grid


def _of_target(args: BenchArgs, engine: EngineChoice, number_format: str) -> dict[str, Any]:
    """The settings of the target in a format, which holds the largest batch."""
    settings = {k: v for k, v in engine.settings.items() if k not in ("draft", "overlap", *OF_DRAFTS)}
    return settings | {"format": number_format, "max_num_seqs": max(args.batch_sizes)}


def _specs(args: BenchArgs, engine: EngineChoice) -> list[SpecConfig]:
    """Each draft with each format, confidence and overlap that affect it, checked. Raises ConfigError, as LLM does."""
    shared = {k: engine.settings[k] for k in OF_DRAFTS}
    chosen: list[Level] = []
    drafts = [draft_choice(name, engine.model) for name in args.drafts]
    for draft, number_format, confidence in product(drafts, args.draft_formats, args.confidences or (None,)):
        level = resolve(make_config(draft, confidence=confidence, **shared).spec)
        if any(each.cls.owns for each in level.every()):
            own = make_config(draft, confidence=confidence, draft_format=number_format, **shared)
            level = resolve(own.spec)
        chosen.append(level)
    if any(level.heeds_confidence for level in chosen):  # the others are measured without it
        chosen = [lv if lv.heeds_confidence else resolve(replace(lv.spec, confidence=None)) for lv in chosen]
    if max(args.overlaps) > 0 and not any(level.can_overlap for level in chosen):
        raise ConfigError(
            f"--overlaps {max(args.overlaps)}: none of these drafts ({', '.join(args.drafts)}) can draft ahead "
            "while the target checks; add a draft model to --drafts, e.g. embedded-draft"
        )
    pairs = product(chosen, args.overlaps)
    specs = [replace(lv.spec, overlap=n) for lv, n in pairs if lv.can_overlap or n <= 0]
    specs = [spec for i, spec in enumerate(specs) if spec not in specs[:i]]
    for spec in specs:
        resolve(spec).check()
    return specs
