"""`sameseed bench`: a prompt file x settings; speculative and plain decoding take turns; one record a measurement."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sameseed.cli.options import EngineChoice, Parsed, draft_choice, option, parse, profile_defaults
from sameseed.config import SpecConfig
from sameseed.errors import ConfigError, RequestError
from sameseed.request import SamplingParams

if TYPE_CHECKING:
    from sameseed.study.measure import Bench, Run
    from sameseed.study.workload import Arm, Prompt, Workload

LEFT_OUT = ("overlap", "temperature", "n", "logprobs")


@dataclass(frozen=True)
class BenchArgs:
    """Measure ways to guess against plain decoding: medians of repetitions in which they take turns.

    Lists make a grid: drafts x ks x overlaps x temperatures x batch sizes x formats. `sameseed bench serve` measures a
    server instead: see its --help.
    """

    prompts: Annotated[Path | None, option("FILE")] = None  # .jsonl (prompt or messages) or .txt; unset: the embedded
    num_prompts: Annotated[int | None, option("N")] = None  # take N of them, spread over the file; unset: all
    drafts: tuple[str, ...] = ("ngram", "auto")  # ways to guess, as generate's --draft: auto is the embedded draft
    ks: tuple[int, ...] = (3, 5, 7)  # draft lengths
    temperatures: tuple[float, ...] = (0.0, 0.8)  # 0 is greedy
    batch_sizes: tuple[int, ...] = (1,)  # prompts that run together
    overlaps: tuple[int, ...] = (0,)  # cores for drafts that can guess on while the target checks; 0: none
    formats: tuple[str, ...] = ("auto",)  # number formats of the target's weights
    repeat: int = 5  # runs of each setting
    out: Annotated[Path | None, option("FILE")] = None  # append records here; unset: benchmarks/results/, if it exists
    json: Annotated[bool, option()] = False  # records to stdout as JSON lines instead of tables


def run(argv: Seq[str], prog: str) -> int:
    """Parse, measure, write; exit code 1 if a text differed from plain decoding's. `bench serve` loads a server."""
    if argv and argv[0] == "serve":
        from sameseed.cli import bench_serve

        return bench_serve.run(argv[1:], f"{prog} serve")
    defaults: dict[str, Any] = {"max_tokens": 96, "seed": 1, "top_p": 0.95, "policy": "fixed"}
    chosen = profile_defaults(argv)  # a profile's choice is one point of the grid
    for name, one in (("drafts", "draft"), ("ks", "num_draft_tokens"), ("formats", "format")):
        defaults |= {name: (chosen[one],)} if one in chosen else {}
    left_out = (*LEFT_OUT, "prefix_cache", "draft", "format", "num_draft_tokens")
    parsed = parse(BenchArgs, argv, prog, engine=True, sampling=True, defaults=defaults, left_out=left_out)
    args = parsed.args
    if args.repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, got {args.repeat}")
    for name in ("drafts", "ks", "temperatures", "batch_sizes", "overlaps", "formats"):
        if not getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} is empty; give at least one value")
    if min(args.batch_sizes) < 1:
        raise ConfigError(f"--batch-sizes must be at least 1, got {min(args.batch_sizes)}")
    # A bad value fails here, before anything is loaded.
    params = [dataclasses.replace(parsed.params, temperature=t) for t in args.temperatures]
    from sameseed.study import record

    out = record.destination(args.out, "bench")
    equal = True
    run_id = None
    for number_format in args.formats:
        run_id, same = _measure(parsed, number_format, params, out, run_id)
        equal = equal and same
    if out is not None and not args.json:
        from sameseed.cli.console import stderr_console

        stderr_console().print(f"records appended to {out}", style="dim")
    return 0 if equal else 1


def _measure(
    parsed: Parsed[BenchArgs], number_format: str, all_params: Seq[SamplingParams], out: Path | None, run_id: str | None
) -> tuple[str, bool]:
    """All workloads of one loaded target; returns the run's name and whether all texts agreed."""
    from sameseed.cli.console import stderr_console
    from sameseed.study import record, report
    from sameseed.study.workload import DEFAULT_PROMPTS, Workload, arms, read_prompts

    args = parsed.args
    path = args.prompts or DEFAULT_PROMPTS
    prompts = read_prompts(path, args.num_prompts)
    ways, longest = arms(_specs(args, parsed.engine), args.ks), max(params.max_tokens for params in all_params)
    bench = open_bench(parsed.engine, ways, args.batch_sizes, number_format, args.json, prompts, longest)
    encoded = []
    for prompt in prompts:
        encoded.append(prompt.encode(bench.llm.tokenizer))
        try:
            bench.llm.engine.check(encoded[-1])
        except RequestError as error:
            raise RequestError(f"prompt {prompt.id}: {error}") from None
    run_id = run_id or record.now()
    here = record.machine()
    equal = True
    for params, size in itertools.product(all_params, args.batch_sizes):
        workload = Workload(path.name, tuple(encoded), params, size)
        runs = run_with_progress(bench, workload, args.repeat, args.json)
        records = record.make_records(bench, parsed.engine.model, workload, runs, run_id, here)
        show(records, out, args.json)
        equal = equal and all(r["equals_plain"] for r in records)
    if not args.json:
        stderr_console().print(report.LEGEND, style="dim")
    return run_id, equal


def run_with_progress(bench: Bench, workload: Workload, repeat: int, quiet: bool) -> dict[Arm, list[Run]]:
    """Warm up and measure one workload under a progress bar."""
    from sameseed.cli.console import progress
    from sameseed.study import report

    with progress(f"{report.chosen(workload.params)}, batch {workload.batch_size}", quiet) as bar:
        task = bar.tasks[0].id
        num_batches = -(-len(workload.prompts) // workload.batch_size)
        bar.update(task, total=repeat * num_batches * len(bench.arms), note="warm-up")
        bench.warm_up(workload)
        return bench.measure(workload, repeat, lambda label: bar.update(task, advance=1, note=label))


def show(records: Seq[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    """Append records to a file, and print them: a table for people, lines for machines."""
    from sameseed.cli.console import keep, show_table, stdout_console
    from sameseed.study import report

    keep(records, out, as_json)
    if not as_json:
        show_table(report.table(records))
        console = stdout_console()
        for text in (text for r in records for text in report.levels(r)):
            console.print(text, style="dim", markup=False)


SPECULATION = ("draft_options", "draft_format", "confidence", "policy")  # flags of the drafts, not of the target


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
    from sameseed.study.measure import Bench, fitted

    speculation = ("draft", "overlap", *SPECULATION)
    settings = {k: v for k, v in engine.settings.items() if k not in speculation}
    settings |= {"format": number_format, "max_num_seqs": max(batch_sizes)}
    settings = fitted(engine.model, settings, prompts, max_tokens)

    def load(model: str, draft: SpecConfig | None, **given: Any) -> Any:
        return load_llm(EngineChoice(model, given | {"draft": draft}), quiet)

    return Bench(engine.model, arms, settings, load)


def _specs(args: BenchArgs, engine: EngineChoice) -> list[SpecConfig]:
    """The SpecConfigs of each --drafts entry: one for each of --overlaps that it can do. Raises ConfigError, as LLM."""
    from sameseed.engine.levels import can_overlap, check_options, check_overlap, check_policies, heeds_confidence
    from sameseed.engine.settings import make_config

    shared = {k: engine.settings[k] for k in SPECULATION}
    chosen = [make_config(draft_choice(name, engine.model), **shared).spec for name in args.drafts]
    if any(heeds_confidence(spec) for spec in chosen):  # the others are measured without
        chosen = [s if heeds_confidence(s) else dataclasses.replace(s, confidence=None) for s in chosen]
    able = [can_overlap(spec) for spec in chosen]
    if max(args.overlaps) > 0 and not any(able):
        raise ConfigError(
            f"--overlaps {max(args.overlaps)}: none of these drafts ({', '.join(args.drafts)}) can guess on while the "
            "target checks; add a draft model to --drafts, e.g. embedded-draft"
        )
    pairs = itertools.product(zip(chosen, able, strict=True), args.overlaps)
    specs = [dataclasses.replace(spec, overlap=threads) for (spec, can), threads in pairs if can or threads <= 0]
    for spec in specs:
        check_options(spec)
        check_overlap(spec)
        check_policies(spec)
    return specs
