"""Records of load tests as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from rich.table import Table

from sameseed.report import table as layout

LEGEND = (
    "load: clients at once, or requests a second; good/s: requests a second within --ttft-slo and --tpot-slo; times in "
    "ms (latency in s): TTFT to the first token, TPOT for each other one, ITL from chunk to chunk (drafts that were "
    "accepted arrive together); medians of the repetitions; speed-up: median of the ratios of repetitions in turns; "
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
