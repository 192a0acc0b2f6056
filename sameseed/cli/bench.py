"""`sameseed bench`: prompts x settings, speculative and plain decoding interleaved; one record per measurement."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from sameseed.cli.options import EngineChoice, Parsed, draft_choice, option, parse, profile_defaults
from sameseed.config import MAX_DRAFT_TOKENS, SpecConfig, draft_text
from sameseed.errors import ConfigError, SameseedError, VocabularyError
from sameseed.request import SamplingParams

if TYPE_CHECKING:
    from sameseed.measure.bench import Bench, Run
    from sameseed.measure.prompt_sets import Prompt
    from sameseed.measure.workload import Arm, Workload

LEFT_OUT = ("overlap", "temperature", "n", "logprobs")
AXES = {  # list flags of bench, and the same flag of other commands, which bench takes too
    "drafts": "draft",
    "ks": "num_draft_tokens",
    "formats": "format",
    "draft_formats": "draft_format",
    "confidences": "confidence",
}


def _axis(flag: str, hint: str | None = None) -> Any:
    return arg(aliases=[flag], help_behavior_hint=hint)


@dataclass(frozen=True)
class BenchArgs:
    """Measure drafters against plain decoding: medians of repetitions in which they are interleaved.

    Lists make a grid: drafts x draft formats x confidences x ks x overlaps x temperatures x batch sizes x formats. The
    whole grid is checked before anything is measured. Ctrl-C ends it, and keeps whole repetitions. `bench serve`
    measures a server: see its --help.
    """

    prompts: Annotated[Path | None, option("FILE")] = None  # .jsonl, .txt, or a set as gsm8k:DIR; unset: embedded
    num_prompts: Annotated[int | None, option("N")] = None  # take N of them, spread over the file; unset: all
    drafts: Annotated[tuple[str, ...], _axis("--draft")] = ("ngram", "auto")  # drafters or models; auto: embedded draft
    draft_formats: Annotated[tuple[str, ...], _axis("--draft-format")] = ("auto",)  # number formats of draft models
    confidences: Annotated[tuple[float, ...], _axis("--confidence", "")] = ()  # end drafts below this; unset: never
    ks: Annotated[tuple[int, ...], _axis("--k")] = (3, 5, 7)  # draft lengths
    temperatures: tuple[float, ...] = (0.0, 0.8)  # 0 is greedy
    batch_sizes: tuple[int, ...] = (1,)  # prompts that run together
    overlaps: tuple[int, ...] = (0,)  # cores for drafting ahead while the target verifies; 0: none
    formats: Annotated[tuple[str, ...], _axis("--format")] = ("auto",)  # number formats of the target's weights
    repeat: int = 5  # runs of each setting
    out: Annotated[Path | None, option("FILE")] = None  # append records here; unset: benchmarks/results/, if it exists
    plot: Annotated[Path | None, option("FILE.png")] = None  # draw speed-up by draft length, as PNG and SVG beside it
    json: Annotated[bool, option()] = False  # records to stdout as JSON lines instead of tables


def run(argv: Seq[str], prog: str) -> int:
    """Parse, measure, write; exit code 1 if an output differed from plain decoding's. `bench serve` loads a server."""
    if argv and argv[0] == "serve":
        from sameseed.cli import bench_serve

        return bench_serve.run(argv[1:], f"{prog} serve")
    defaults: dict[str, Any] = {"max_tokens": 96, "seed": 1, "top_p": 0.95, "policy": "fixed"}
    chosen = profile_defaults(argv)  # a profile's choice is one point of the grid
    for name, one in AXES.items():
        defaults |= {name: (chosen[one],)} if chosen.get(one) is not None else {}
    left_out = (*LEFT_OUT, "prefix_cache", *AXES.values())
    parsed = parse(BenchArgs, argv, prog, engine=True, sampling=True, defaults=defaults, left_out=left_out)
    args = parsed.args
    _check_axes(args)
    params = [dataclasses.replace(parsed.params, temperature=t) for t in args.temperatures]
    from sameseed.cli.console import check_outputs, stderr_console
    from sameseed.measure import bench_report as report
    from sameseed.measure.bench import fitting
    from sameseed.measure.bench_report import plot_speedups
    from sameseed.measure.workload import DEFAULT_PROMPTS, read_prompts
    from sameseed.models.loader import resolve_model
    from sameseed.report import record

    check_outputs(plot=args.plot)
    out = record.destination(args.out, "bench")
    prompts = read_prompts(args.prompts or DEFAULT_PROMPTS, args.num_prompts)
    grid = _possible(args, parsed.engine)
    prompts = fitting(resolve_model(parsed.engine.model), parsed.engine.settings, prompts, _left_out)
    run_id, found, failed = record.now(), list[dict[str, Any]](), False
    for number_format, specs in grid.items():
        ahead = 0 if found else len(grid)  # the total time is estimated once
        try:
            found += _measure(parsed, number_format, specs, params, prompts, out, run_id, ahead)
        except SameseedError as error:  # what was measured is written; the other formats are still to measure
            failed = True
            stderr_console().print(f"failed: target in {number_format}: {error}", style="red", markup=False)
    written = [] if out is None else [f"records appended to {out}"]
    if args.plot is not None and found:
        written += [f"written: {path}" for path in plot_speedups(found, args.plot)]
    for text in [] if args.json else [report.LEGEND, *written]:
        stderr_console().print(text, style="dim")
    return 0 if all(r["equals_plain"] for r in found) and not failed else 1


def _left_out(text: str) -> None:
    from sameseed.cli.console import stderr_console

    stderr_console().print(f"left out: {text}", style="yellow", markup=False, soft_wrap=True)


def _measure(
    parsed: Parsed[BenchArgs],
    number_format: str,
    specs: Seq[SpecConfig],
    all_params: Seq[SamplingParams],
    prompts: Seq[Prompt],
    out: Path | None,
    run_id: str,
    ahead: int,
) -> list[dict[str, Any]]:
    """Measure all workloads of one loaded target; returns their records.

    `ahead`: targets still to measure, this one included, for an estimate of the time; 0: no estimate.
    """
    from sameseed.measure.bench import BenchStopped
    from sameseed.measure.bench_report import make_records
    from sameseed.measure.workload import DEFAULT_PROMPTS, arms, prompts_name
    from sameseed.report import record

    args, found = parsed.args, list[dict[str, Any]]()
    longest = max(params.max_tokens for params in all_params)
    ways = arms(specs, args.ks)
    bench = open_bench(parsed.engine, ways, args.batch_sizes, number_format, args.json, prompts, longest)
    name, here = prompts_name(args.prompts or DEFAULT_PROMPTS), record.machine()
    for params, size in itertools.product(all_params, args.batch_sizes):
        workload = bench.workload(name, prompts, params, size)
        alike = 0 if found else ahead * len(all_params) * len(args.batch_sizes)
        try:
            runs, stopped = run_with_progress(bench, workload, args.repeat, args.json, alike), None
        except BenchStopped as stop:
            runs, stopped = stop.runs, stop
        records = make_records(bench, parsed.engine.model, workload, runs, run_id, here)
        show(records, out, args.json)
        if stopped is not None:
            raise stopped
        found += records
    return found


def _possible(args: BenchArgs, engine: EngineChoice) -> dict[str, list[SpecConfig]]:
    """The drafts that can run, by the target's format; the others are named on stderr with the reason.

    Nothing is loaded. Raises ConfigError or RegistryError for a misspelt name, and the first reason if none can run.
    """
    from sameseed.engine.build import check_parts
    from sameseed.engine.memory import plan_blocks
    from sameseed.engine.settings import make_config
    from sameseed.models.loader import read_config, resolve_model
    from sameseed.scheme import QuantScheme

    specs = _specs(args, engine)
    for name in args.formats:
        QuantScheme.parse(name)
    folder = resolve_model(engine.model)
    longest = engine.settings["max_model_len"] or read_config(folder).max_model_len
    grid: dict[str, list[SpecConfig]] = {}
    wrong: list[SameseedError] = []
    for number_format, spec in itertools.product(args.formats, specs):
        try:
            config = make_config(spec, **_target_settings(engine, args.batch_sizes, number_format))
            plan_blocks(config, longest, check_parts(folder, config).demands)
            grid.setdefault(number_format, []).append(spec)
        except (ConfigError, VocabularyError) as error:
            wrong.append(error)
            _left_out(f"{draft_text(spec)}, target in {number_format}: {error}")
    if not grid:
        raise wrong[0]
    return grid


def run_with_progress(
    bench: Bench, workload: Workload, repeat: int, quiet: bool, alike: int = 0
) -> dict[Arm, list[Run]]:
    """Warm up and measure one workload under a progress bar. `alike`: workloads to estimate the time of; 0: none."""
    from sameseed.cli.console import progress
    from sameseed.measure import bench_report as report

    with progress(f"{report.chosen(workload.params)}, batch {workload.batch_size}", quiet) as bar:
        task = bar.tasks[0].id
        num_batches = -(-len(workload.prompts) // workload.batch_size)
        bar.update(task, total=repeat * num_batches * len(bench.arms), note="warm-up")
        seconds = alike * repeat * num_batches * bench.warm_up(workload)
        if seconds > SHORT:
            bar.console.print(f"about {seconds / 60:.0f} minutes for all, as the first tokens were; Ctrl-C ends it")
        return bench.measure(workload, repeat, lambda label: bar.update(task, advance=1, note=label))


def show(records: Seq[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    """Append records to a file, and print them, as a table or as JSON lines."""
    from sameseed.cli.console import keep, show_table, stdout_console
    from sameseed.measure import bench_report as report

    keep(records, out, as_json)
    if not as_json:
        show_table(report.table(records))
        for text in (text for r in records for text in report.levels(r)):
            stdout_console().print(text, style="dim", markup=False)


OF_DRAFTS = ("draft_options", "policy")  # flags of the drafts, not of the target
SHORT = 60.0  # seconds that need no announcement


def _target_settings(engine: EngineChoice, batch_sizes: Seq[int], number_format: str) -> dict[str, Any]:
    settings = {k: v for k, v in engine.settings.items() if k not in ("draft", "overlap", *OF_DRAFTS)}
    return settings | {"format": number_format, "max_num_seqs": max(batch_sizes)}


def open_bench(
    engine: EngineChoice,
    arms: Seq[Arm],
    batch_sizes: Seq[int],
    number_format: str,
    quiet: bool,
    prompts: Seq[Prompt] = (),
    max_tokens: int = 0,
) -> Bench:
    """A Bench of these arms with a cache that fits the largest batch of these prompts."""
    from sameseed.cli.console import load_llm
    from sameseed.measure.bench import Bench, fitted

    settings = fitted(engine.model, _target_settings(engine, batch_sizes, number_format), prompts, max_tokens)

    def load(model: str, draft: SpecConfig | None, **given: Any) -> Any:
        return load_llm(EngineChoice(model, given | {"draft": draft}), quiet)

    return Bench(engine.model, arms, settings, load)


def _check_axes(args: BenchArgs) -> None:
    """Raise ConfigError for a grid without cells, or a number out of its range."""
    if args.repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, got {args.repeat}")
    for name in ("drafts", "draft_formats", "ks", "temperatures", "batch_sizes", "overlaps", "formats"):
        if not getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} is empty; give at least one value")
    if min(args.batch_sizes) < 1:
        raise ConfigError(f"--batch-sizes must be at least 1, got {min(args.batch_sizes)}")
    if max(args.ks) > MAX_DRAFT_TOKENS or min(args.ks) < 0:
        raise ConfigError(f"--ks must lie in 0..{MAX_DRAFT_TOKENS}, got {args.ks}")


def _specs(args: BenchArgs, engine: EngineChoice) -> list[SpecConfig]:
    """Each draft with each format, confidence and overlap that affect it, checked. Raises ConfigError, as LLM does."""
    from sameseed.engine.levels import Level, resolve
    from sameseed.engine.settings import make_config

    shared = {k: engine.settings[k] for k in OF_DRAFTS}
    chosen: list[Level] = []
    drafts = [draft_choice(name, engine.model) for name in args.drafts]
    for draft, number_format, confidence in itertools.product(drafts, args.draft_formats, args.confidences or (None,)):
        level = resolve(make_config(draft, confidence=confidence, **shared).spec)
        if any(each.cls.owns for each in level.every()):
            own = make_config(draft, confidence=confidence, draft_format=number_format, **shared)
            level = resolve(own.spec)
        chosen.append(level)
    if any(level.heeds_confidence for level in chosen):  # the others are measured without it
        chosen = [
            lv if lv.heeds_confidence else resolve(dataclasses.replace(lv.spec, confidence=None)) for lv in chosen
        ]
    if max(args.overlaps) > 0 and not any(level.can_overlap for level in chosen):
        raise ConfigError(
            f"--overlaps {max(args.overlaps)}: none of these drafts ({', '.join(args.drafts)}) can draft ahead "
            "while the target checks; add a draft model to --drafts, e.g. embedded-draft"
        )
    pairs = itertools.product(chosen, args.overlaps)
    specs = [dataclasses.replace(lv.spec, overlap=n) for lv, n in pairs if lv.can_overlap or n <= 0]
    specs = [spec for i, spec in enumerate(specs) if spec not in specs[:i]]
    for spec in specs:
        resolve(spec).check()
    return specs
