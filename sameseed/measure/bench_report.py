"""The records of `sameseed bench`, one per arm, and their table for a terminal and plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from sameseed import registry, store
from sameseed.engine.alarm import REMEDY, is_useless
from sameseed.engine.llm import LLM
from sameseed.measure.bench import Bench, Run
from sameseed.measure.usage import Usage
from sameseed.measure.workload import Arm, Workload, spec_as_dict, stored
from sameseed.models.loader import resolve_model
from sameseed.report import table as layout
from sameseed.report.plot import Panel, draw, lines, source
from sameseed.report.record import model_name, origin
from sameseed.report.schemas import BENCH_SCHEMA
from sameseed.request import SamplingParams

SAMPLED = ("max_tokens", "temperature", "top_k", "top_p", "min_p")  # fields of SamplingParams that a record holds
# Fields of SpecMetrics that a record holds.
COUNTED = ["num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_ahead", "num_ahead_kept"]
COUNTED += ["acceptance_rate", "mean_acceptance_length"]


def config_as_dict(llm: LLM, model: str, arm: Arm, workload: Workload) -> dict[str, object]:
    """The resolved configuration of an arm (without "auto" values), for its record."""
    engine, c, params = llm.engine, llm.config, workload.params
    return {
        "label": arm.label,
        "model": model_name(model),
        "model_digest": store.weights_key(resolve_model(model)),
        **stored(engine.runner.model, c.format, engine.runner.cache.format),
        **spec_as_dict(arm.spec),
        "draft_digest": store.weights_key(resolve_model(arm.spec.model)) if arm.spec.model else None,
        "device": c.device,
        "block_size": engine.runner.cache.block_size,
        "num_blocks": engine.runner.cache.num_blocks,
        **{name: getattr(c, name) for name in ("max_num_rows", "max_num_seqs")},
        "max_model_len": engine.max_model_len,
        "batch_size": workload.batch_size,
        "prompts": workload.name,
        "num_prompts": len(workload.prompts),
        "num_prompt_tokens": sum(map(len, workload.prompts)),
        **{name: getattr(params, name) for name in (*SAMPLED, "seed", "ignore_eos")},
    }


def make_records(
    bench: Bench, model: str, workload: Workload, runs: Mapping[Arm, Seq[Run]], run_id: str, here: Mapping[str, object]
) -> list[dict[str, Any]]:
    """The records of one measured workload, one per arm, plain decoding first."""
    plain = runs[bench.arms[0]]
    records = []
    for arm in bench.arms:
        made = make_record(config_as_dict(bench.llm, model, arm, workload), runs[arm], plain, run_id, here)
        middle = sorted(range(len(plain)), key=lambda i: made["repetitions"][i]["speedup"])[len(plain) // 2]
        found = bench.predict(arm, runs[arm][middle], plain[middle])
        records.append(made if found is None else {**made, "prediction": asdict(found)})
    return records


def make_record(
    config: Mapping[str, object], runs: Seq[Run], plain: Seq[Run], run_id: str, machine_: Mapping[str, object]
) -> dict[str, Any]:
    """The record of one arm. `runs[i]` and `plain[i]` were interleaved, so `speedup` is the median of their ratios.

    `decode_speedup`: the same after the first tokens. `tokens_per_s` is plain decoding's median times `speedup`: the
    arm's own median could contradict `speedup`.
    """
    ratios = [mine.tokens_per_s / its.tokens_per_s for mine, its in zip(runs, plain, strict=True)]
    later = [(mine.decoded_per_s, its.decoded_per_s) for mine, its in zip(runs, plain, strict=True)]
    equal = [mine.texts == its.texts for mine, its in zip(runs, plain, strict=True)]
    metrics, levels, usage = runs[0].metrics, runs[0].levels, Usage()
    for run in runs:
        usage.add(run.usage)
    done = [c.metrics for run in runs for c in run.completions]
    draft = str(config.get("draft", "none"))
    owns = draft != "none" and registry.load("drafters", draft).DRAFTER.owns
    return {
        **origin(BENCH_SCHEMA, machine_),
        "run": run_id,
        "config": dict(config),
        "repetitions": [
            {name: getattr(run, name) for name in ("seconds", "num_tokens", "tokens_per_s", "num_steps")}
            | {"speedup": ratio, "equals_plain": same, "time_split": _split(run)}
            for run, ratio, same in zip(runs, ratios, equal, strict=True)
        ],
        "tokens_per_s": median(run.tokens_per_s for run in plain) * median(ratios),
        "repeated": runs[0].repeated,
        "latency_s": spread([m.total_time for m in done]),
        "ttft_s": spread([m.time_to_first_token for m in done]),
        "time_per_output_token_s": spread([m.time_per_output_token for m in done if m.num_output_tokens > 1]),
        **{name: getattr(metrics, name) for name in COUNTED},
        "rollbacks": metrics.num_rollbacks,
        "accepted_per_pos": list(metrics.num_accepted_tokens_per_pos),
        "speedup": median(ratios),
        "decode_speedup": median(a / b for a, b in later) if all(b for _, b in later) else None,
        "equals_plain": all(equal),
        "time_split": {name: median(_split(run)[name] for run in runs) for name in _split(runs[0])},
        "overhead_ms_per_round": median(run.overhead / run.num_steps for run in runs) * 1e3,
        "usage": usage.as_dict(sum(run.num_tokens for run in runs)),
        "draft_lengths": runs[0].draft_lengths,
        **({"levels": {name: level.as_dict() for name, level in levels.items()}} if levels else {}),
        **({"useless_draft": True} if owns and is_useless(metrics) else {}),
    }


def spread(values: Seq[float]) -> dict[str, float | None]:
    """Median, mean and 95th percentile of `values`; all None if there are none."""
    if not values:
        return {"median": None, "mean": None, "p95": None}
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"median": median(ordered), "mean": sum(ordered) / len(ordered), "p95": p95}


def _split(run: Run) -> dict[str, float]:
    t = run.times
    return {**asdict(t), "rest": run.seconds - t.draft - t.target - t.verify - t.schedule}


LEGEND = (
    "speed-up: of the whole run, in brackets as costs and acceptance predict it; after prompt: without the time to "
    "first tokens; accepted: share of the drafted tokens; per draft: tokens that a draft yields, the target's own one "
    "included; rolled back: rounds with a rejected token; first token: time to it; overhead: time of a round outside "
    "both models' passes; same text: token for token as plain decoding"
)


def chosen(params: SamplingParams) -> str:
    """The sampling settings in a few words."""
    if params.greedy:
        return "greedy"
    top = f" top-p {params.top_p:g}" if params.top_p != 1 else ""
    return f"temperature {params.temperature:g}{top} seed {params.seed}"


def title(config: Mapping[str, Any]) -> str:
    """The title of a table: the settings that all of its rows share."""
    how = chosen(SamplingParams(temperature=config["temperature"], top_p=config["top_p"], seed=config["seed"]))
    return (
        f"{config['model']} ({config['num_parameters'] / 1e6:.1f} M, {config['format']}), {how}, "
        f"batch {config['batch_size']}, {config['num_prompts']} prompts"
    )


def cells(record: Mapping[str, Any]) -> dict[str, str]:
    """One record as a row: cell texts by column head."""
    plain = record["config"]["draft"] == "none"
    prediction = record.get("prediction")
    predicted = "" if prediction is None else f" ({prediction['speedup']:.2f}x)"
    later = None if plain else record.get("decode_speedup")
    rate, length, first = record["acceptance_rate"], record["mean_acceptance_length"], record["ttft_s"]["median"]
    same = "[green]yes[/]" if record["equals_plain"] else "[bold red]NO[/]"
    return {
        "decoding": record["config"]["label"],
        "tokens/s": f"{record['tokens_per_s']:.1f}",
        "speed-up": "1" if plain else f"{record['speedup']:.2f}x{predicted}",
        "after prompt": "" if later is None else f"{later:.2f}x",
        "accepted": "" if rate is None else f"{rate:.0%}",
        "per draft": "" if length is None else f"{length:.2f}",
        "rolled back": "" if plain else str(record["rollbacks"]),
        "first token ms": f"{first * 1e3:.1f}",
        "overhead ms": f"{record['overhead_ms_per_round']:.2f}",
        "same text": "" if plain else same,
    }


def levels(record: Mapping[str, Any]) -> list[str]:
    """A line for each lower-level drafter with counts of its own, and a warning if almost nothing was accepted."""
    lines = [
        f"{record['config']['label']}: {name}: {m['num_accepted_tokens']} of {m['num_draft_tokens']} drafted accepted"
        + (f", {m['mean_acceptance_length']:.2f} per draft" if m["num_drafts"] else "")
        for name, m in record.get("levels", {}).items()
    ]
    if record.get("useless_draft"):
        lines.append(f"{record['config']['label']}: next to nothing was accepted. {REMEDY}")
    return lines


def table(records: Seq[Mapping[str, Any]]) -> Table:
    """A table of records that differ only in how they decode; the fastest row is bold."""
    repeated = records[0].get("repeated")
    said = "" if repeated is None else f"\n{repeated:.0%} of the 8-grams of plain decoding's texts repeat earlier ones"
    heads = [name.replace(" ", "\n") for name in cells(records[0])]
    made = layout.table(title(records[0]["config"]) + said, heads)
    best = max(records, key=lambda r: float(r["tokens_per_s"]))
    for record in records:
        made.add_row(*cells(record).values(), style="bold" if record is best else None)
    return made


def plot_speedups(records: Seq[Mapping[str, Any]], path: Path) -> tuple[Path, Path]:
    """Plot speed-up by draft length, a panel per workload and a line per draft, as PNG and SVG; returns their paths."""
    panels: dict[str, list[tuple[str, int, float, list[float]]]] = {}
    for record in records:
        c, points = record["config"], panels.setdefault(title(record["config"]), [])
        if c["draft"] != "none":
            name, ratios = c["label"].replace(f" k={c['num_draft_tokens']}", ""), record["repetitions"]
            points.append((name, c["num_draft_tokens"], record["speedup"], [r["speedup"] for r in ratios]))
    drawn = [
        Panel(name, "draft tokens", lines(points), y="times plain decoding", level=1.0)
        for name, points in panels.items()
    ]
    runs = f"medians of {len(records[0]['repetitions'])} runs, bands: least to most"
    head = f"Speed over plain decoding: {records[0]['config']['model']}"
    return draw(drawn, path, head, source(records[0], runs), columns=1)
