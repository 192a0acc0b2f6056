"""Records of load tests, one JSON line per arm of a cell, and their table and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from sameseed.measure.load.bench import LoadBench, LoadLevel, Repetition
from sameseed.measure.load.outcome import RECORDED, acceptance, same_texts
from sameseed.measure.load.prompts import Shape
from sameseed.measure.load.wire import Endpoint
from sameseed.measure.workload import prompts_name
from sameseed.report import plot, record as records, table as layout
from sameseed.report.plot import Panel
from sameseed.report.schemas import LOAD_SCHEMA

RATES = ("output_tokens_per_s", "requests_per_s", "goodput_requests_per_s")
SPREADS = ("ttft_ms", "tpot_ms", "itl_chunk_ms", "itl_token_ms", "e2e_ms")
BUSY = 0.7  # share of a core above which the load generator itself may limit the result
CUT = 0.7  # share of the asked prompt tokens below which the server seems to have cut prompts
LATE = 20.0  # ms of delay in sending, above which a remark is made


def config(bench: LoadBench, arm: Endpoint, shape: Shape, level: LoadLevel) -> dict[str, Any]:
    """The configuration of one arm for a record, without the server's address, which may be private."""
    s = bench.settings
    return {
        "label": arm.label,
        "arms": [a.label for a in bench.arms],
        "model": arm.model.rstrip("/").rpartition("/")[2],
        "served": arm.speculation,
        "chat": arm.chat,
        "fields": dict(arm.fields),
        "prompts": prompts_name(Path(s.prompts)),
        "lengths": shape.label,
        "num_input_tokens": shape.num_input,
        "max_tokens": shape.num_output,
        "concurrency": level.concurrency,
        "rate": level.rate,
        "burstiness": level.burstiness if level.rate is not None else None,
        "num_requests": s.count(level),
        **{name: getattr(s, name) for name in ("max_seconds", "warm_up", "seed")},
        "sampling": dict(s.sampling),
        "ignore_eos": bool(({**s.sampling, **arm.fields}).get("ignore_eos")),
        "ttft_bound_s": s.ttft_slo,
        "tpot_bound_s": s.tpot_slo,
    }


def make_records(
    bench: LoadBench, shape: Shape, level: LoadLevel, found: Mapping[str, list[Repetition]], run_id: str
) -> list[dict[str, Any]]:
    """The records of one cell, one per arm. The first arm is the baseline of the others."""
    base = found[bench.arms[0].label]
    made: list[dict[str, Any]] = []
    for arm in bench.arms:
        mine, summaries = found[arm.label], [r.summary for r in found[arm.label]]
        record: dict[str, Any] = {
            **records.origin(LOAD_SCHEMA),
            "run": run_id,
            "config": config(bench, arm, shape, level),
            "repetitions": summaries,
            **{name: median(s[name] for s in summaries) for name in RATES},
            **{name: _middle([s[name] for s in summaries]) for name in SPREADS},
            "errors": dict(sum((Counter(s["errors"]) for s in summaries), Counter())),
            "retries": sum(s["retries"] for s in summaries),
            "speedup": None,
            "same_texts": None,
        }
        known = [s["acceptance"] for s in summaries if s["acceptance"] is not None]
        record["acceptance"] = acceptance(known, RECORDED, known[0]["source"]) if known else None
        if arm is not bench.arms[0]:
            record |= _against(mine, base)
        if record["speedup"] and made[0]["output_tokens_per_s"]:  # the arm's own median could contradict the speed-up
            record["output_tokens_per_s"] = made[0]["output_tokens_per_s"] * record["speedup"]
        record["remarks"] = remarks(bench, record, min(r.summary["num_requests"] for r in (*mine, *base)))
        made.append(record)
    return made


def _middle(spreads: list[dict[str, float | None] | None]) -> dict[str, float | None] | None:
    """The median of each percentile over the repetitions; None if any repetition has none."""
    if None in spreads:
        return None
    values = {name: [v for s in spreads if s and (v := s[name]) is not None] for name in spreads[0] or ()}
    return {name: median(found) if found else None for name, found in values.items()}


def _against(mine: list[Repetition], base: list[Repetition]) -> dict[str, Any]:
    """Comparison with the baseline: medians of the ratios of interleaved repetitions, and the number of equal texts."""

    def ratios(of: Callable[[dict[str, Any]], float | None]) -> list[float]:
        pairs = [(of(m.summary), of(b.summary)) for m, b in zip(mine, base, strict=True)]
        return [m / b for m, b in pairs if m is not None and b]

    speedups, first = ratios(lambda s: s["output_tokens_per_s"]), ratios(lambda s: s["ttft_ms"]["p50"])
    same = [same_texts(m.outcomes, b.outcomes) for m, b in zip(mine, base, strict=True)]
    return {
        "speedup": median(speedups) if speedups else None,
        "speedups": speedups,
        "ttft_ratio": median(first) if first else None,
        "same_texts": [sum(s for s, _ in same), sum(n for _, n in same)],
    }


def remarks(bench: LoadBench, record: Mapping[str, Any], fewest: int) -> list[str]:
    """What limits the record's values. `fewest`: the least requests in a repetition of this arm or its baseline."""
    repetitions, c, accepted = record["repetitions"], record["config"], record["acceptance"]
    counted = {name for r in repetitions for name in r["counted"]}
    by_chunks, no_sizes = "chunks" in counted, record["itl_token_ms"] is None and bool(counted)
    short = not by_chunks and any(r["num_output_tokens"] < r["num_completed"] * c["max_tokens"] for r in repetitions)
    by_characters = c["num_input_tokens"] is not None and not bench.tokenized
    known = any(r["num_cached_tokens"] for r in repetitions)
    sent = CUT * (c["num_input_tokens"] or 0)
    less = any((n := r["num_prompt_tokens"]) is not None and n < sent * r["num_completed"] for r in repetitions)
    drafted = c["fields"].get("speculation") == "off" and accepted is not None
    cut = f"--max-seconds ended a run after {fewest} of {c['num_requests']} requests: arms may have sent different ones"
    burst = min(r["num_requests"] for r in repetitions) < 2 * (c["concurrency"] or 0)
    busy = any(r["generator_cpu"] > BUSY for r in repetitions)
    late = any((r["late_ms"] or 0) > LATE for r in repetitions)
    everybody = accepted is not None and accepted["source"] == "/metrics"
    said = {
        "the server tells no usage: output tokens are chunks, too few where tokens arrive together": by_chunks,
        "the server does not tell which tokens a chunk holds: ITL by chunks only": no_sizes,
        "some answers ended before their length (--ignore-eos generates to it): compare throughput with care": short,
        "the server has no /tokenize: prompts have about the asked length, by their characters": by_characters,
        "the server read far fewer prompt tokens than were sent: raise its context (num_ctx of Ollama)": less,
        "the server knew parts of prompts from before: first tokens came sooner than of new prompts": known,
        "the server drafted although speculation was off: the arms are alike": drafted,
        cut: fewest < c["num_requests"],
        "fewer than two requests a client: this is a burst, and not all clients are busy throughout": burst,
        "the generator took most of a core: its own speed may be what was measured": busy,
        f"some requests were sent more than {LATE:g} ms late": late,
        "acceptance is from the server's counters, which count everybody's requests": everybody,
    }
    return [text for text, holds in said.items() if holds]


LEGEND = (
    "load: clients at once, or requests a second; good/s: requests a second within --ttft-slo and --tpot-slo; times in "
    "ms (latency in s): TTFT to the first token, TPOT for each other one, ITL from chunk to chunk (drafts that were "
    "accepted arrive together); medians of the repetitions; speed-up: median of the ratios of interleaved repetitions; "
    "tokens/s of a second arm: the first's times that"
)


def title(config: Mapping[str, Any]) -> str:
    """The title of a table: the settings that all of its rows share."""
    asked = config["num_input_tokens"]
    shape = f"{asked} tokens in ({config['prompts']})" if asked else f"prompts of {config['prompts']}"
    return f"{config['model']}: {shape}, {config['max_tokens']} out"


def cells(record: Mapping[str, Any]) -> dict[str, str]:
    """One record as a row: cell texts by column head."""
    c, accepted, same = record["config"], record["acceptance"], record["same_texts"]
    bounded = c["ttft_bound_s"] is not None or c["tpot_bound_s"] is not None
    failed = sum(record["errors"].values())
    return {
        "load": f"{c['concurrency']}" if c["rate"] is None else f"{c['rate']:g}/s",
        "arm": c["label"],
        "tokens\nper s": f"{record['output_tokens_per_s']:.1f}",
        "speed-up": "" if record["speedup"] is None else f"{record['speedup']:.2f}x",
        "requests\nper s": f"{record['requests_per_s']:.2f}",
        "good/s": f"{record['goodput_requests_per_s']:.2f}" if bounded else "",
        "TTFT\np50 p90 p99": _joined(record["ttft_ms"], ("p50", "p90", "p99")),
        "TPOT\np50 p99": _joined(record["tpot_ms"], ("p50", "p99")),
        "ITL\np50 p99": _joined(record["itl_chunk_ms"], ("p50", "p99")),
        "latency s\np50 p99": _joined(record["e2e_ms"], ("p50", "p99"), 1e3),
        "accepted": "" if accepted is None else f"{accepted['acceptance_rate']:.0%}",
        "per\ndraft": "" if accepted is None else f"{accepted['mean_acceptance_length']:.2f}",
        "same\ntext": "" if same is None else "yes" if same[0] == same[1] else f"{same[0]} of {same[1]}",
        "failed": str(failed) if failed else "",
        "retries": str(record["retries"]) if record["retries"] else "",
    }


def _joined(spread: Mapping[str, float | None], names: Seq[str], unit: float = 1.0) -> str:
    """Percentiles side by side, with about three digits each; percentiles without a value are left out."""
    values = [v / unit for name in names if (v := spread[name]) is not None]
    return " ".join(f"{v:.0f}" if v >= 100 else f"{v:.1f}" if v >= 10 else f"{v:.2f}" for v in values)


def table(records: Seq[Mapping[str, Any]]) -> Table:
    """Table of the load levels of one shape, without empty columns."""
    rows = [cells(r) for r in records]
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    made = layout.table(title(records[0]["config"]), shown, left=[shown.index("arm")])
    for record, row in zip(records, rows, strict=True):
        for name in ("same\ntext", "failed"):
            if row[name]:
                row[name] = f"[green]{row[name]}[/]" if row[name] == "yes" else f"[bold red]{row[name]}[/]"
        last = record["config"]["label"] == record["config"]["arms"][-1]
        made.add_row(*(row[name] for name in shown), end_section=last and len(record["config"]["arms"]) > 1)
    return made


def notes(records: Seq[Mapping[str, Any]]) -> list[str]:
    """All remarks, each once, and the failed requests of each record."""
    found = dict.fromkeys(remark for r in records for remark in r["remarks"])
    lines = [f"note: {remark}" for remark in found]
    for record in records:
        if record["errors"]:
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(record["errors"].items()))
            example = next((r["error_details"][0] for r in record["repetitions"] if r["error_details"]), "")
            lines.append(f"failed at {cells(record)['load']}, {record['config']['label']}: {kinds}; e.g. {example}")
    return lines


PANELS = (  # title, and the value of a record or of one repetition
    ("output tokens a second", lambda r: r["output_tokens_per_s"]),
    ("generation time: median seconds", lambda r: r["e2e_ms"]["p50"] and r["e2e_ms"]["p50"] / 1e3),
    ("time to first token: median ms", lambda r: r["ttft_ms"]["p50"]),
)


def draw(records: Seq[Mapping[str, Any]], path: Path) -> tuple[Path, Path]:
    """Plot a run's records as PNG and SVG: one row per shape, one line per arm. Raises ConfigError."""
    shapes = dict.fromkeys(r["config"]["lengths"] for r in records)
    panels = [
        _panel(f"{name} ({shape})", [r for r in records if r["config"]["lengths"] == shape], of)
        for shape in shapes
        for name, of in PANELS
    ]
    about = plot.source(records[0], f"medians of {len(records[0]['repetitions'])} runs, bands: least to most")
    return plot.draw(panels, path, f"{records[0]['config']['model']} under load", about)


def _panel(title: str, records: Seq[Mapping[str, Any]], of: Callable[[Any], float | None]) -> Panel:
    """One line per arm through the medians, with a band from the least to the largest repetition."""
    closed = records[0]["config"]["rate"] is None
    x = "concurrency" if closed else "rate"
    points = [
        (r["config"]["label"], r["config"][x], value, [v for s in r["repetitions"] if (v := of(s)) is not None])
        for r in records
        if (value := of(r)) is not None
    ]
    return Panel(title, "clients at once" if closed else "requests a second", plot.lines(points))
