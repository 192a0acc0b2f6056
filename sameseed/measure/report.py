"""Benchmark records as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from rich.table import Table

from sameseed.engine.alarm import REMEDY
from sameseed.report import table as layout
from sameseed.request import SamplingParams

COLUMNS = (
    "decoding",
    "tokens/s",
    "speed-up",
    "after prompt",
    "accepted",
    "per draft",
    "rolled back",
    "first token ms",
    "overhead ms",
    "same text",
)
LEGEND = (
    "speed-up: of the whole run, in brackets as costs and acceptance predict it; after prompt: without the time to "
    "first tokens; "
    "accepted: share of the drafted tokens; per draft: tokens that a draft yields, the target's own one included; "
    "rolled back: rounds with a rejected token; first token: time to it; overhead: time of a round outside both "
    "models' passes; same text: token for token as plain decoding"
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


def cells(record: Mapping[str, Any]) -> list[str]:
    """One record as a row, in the order of COLUMNS."""
    plain = record["config"]["draft"] == "none"
    prediction = record.get("prediction")
    predicted = "" if prediction is None else f" ({prediction['speedup']:.2f}x)"
    later = None if plain else record.get("decode_speedup")
    rate, length, first = record["acceptance_rate"], record["mean_acceptance_length"], record["ttft_s"]["median"]
    return [
        record["config"]["label"],
        f"{record['tokens_per_s']:.1f}",
        "1" if plain else f"{record['speedup']:.2f}x{predicted}",
        "" if later is None else f"{later:.2f}x",
        "" if rate is None else f"{rate:.0%}",
        "" if length is None else f"{length:.2f}",
        "" if plain else str(record["rollbacks"]),
        f"{first * 1e3:.1f}",
        f"{record['overhead_ms_per_round']:.2f}",
        "" if plain else "yes" if record["equals_plain"] else "NO",
    ]


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
    made = layout.table(title(records[0]["config"]) + said, [name.replace(" ", "\n") for name in COLUMNS])
    best = max(records, key=lambda r: float(r["tokens_per_s"]))
    for record in records:
        row = cells(record)
        if row[-1]:
            row[-1] = f"[green]{row[-1]}[/]" if record["equals_plain"] else f"[bold red]{row[-1]}[/]"
        made.add_row(*row, style="bold" if record is best else None)
    return made
