"""Evaluations as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from functools import partial
from typing import Any

from rich import box
from rich.table import Table

from sameseed.study.quality.bootstrap import Interval
from sameseed.study.quality.compare import Comparison, Row
from sameseed.study.quality.speed import CHAIN, CONTEXT, DraftAcceptance
from sameseed.study.quality.suite import Quality

LEGEND = (
    "in brackets: 95 % bootstrap intervals (over questions; of perplexity over stretches of text; of ratios paired). "
    "weights: in memory; memory added: peak of a process of its own above its start; as target: drafted for; as draft: "
    "drafting for the first column; per draft: tokens that a draft yields, the target's own one included; "
    f"c({CHAIN}): time of a pass over {CHAIN} tokens against one, {CONTEXT} cached"
)

NONE: Interval = (float("nan"), float("nan"))


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False
    )


def quality(record: Mapping[str, Any]) -> Table:
    """One model's figures, from its record."""
    c = record["config"]
    made = _table(f"{c['model']}, {c['format']}, KV {c['kv_format']}")
    for i, name in enumerate(("task", "metric", "value", "95 % interval", "n", "")):
        made.add_column(name, justify="left" if i in (0, 1, 5) else "right")
    p = record["perplexity"]
    if p is not None:
        low_high = "" if p["interval"] is None else f"{p['interval'][0]:.3f} .. {p['interval'][1]:.3f}"
        about = f"window {p['window']}, stride {p['stride']}"
        value = "not finite"
        if p["value"] is not None:
            value, about = f"{p['value']:.3f}", f"{p['bits_per_byte']:.4f} bits a byte; {about}"
        made.add_row(p["text"], "perplexity", value, low_high, f"{p['tokens']} tokens", about)
    for t in record["tasks"]:
        low_high = "" if t["interval"] is None else f"{t['interval'][0]:.1%} .. {t['interval'][1]:.1%}"
        made.add_row(t["task"], t["metric"], f"{t['value']:.1%}", low_high, str(t["num_questions"]), _about(t))
    return made


def _about(task: Mapping[str, Any]) -> str:
    parts = []
    if "chance" in task:
        parts.append(f"chance {task['chance']:.1%}")
    if "strict" in task:
        parts.append(f"with ####: {task['strict']:.1%}")
    if task.get("without_letter"):
        parts.append(f"{task['without_letter']} without a letter")
    if task.get("errors"):
        parts.append(", ".join(f"{name} {count}" for name, count in task["errors"].items()))
    return "; ".join(parts)


def notes(record: Mapping[str, Any]) -> list[str]:
    """What must be said beside a record's figures."""
    p = record["perplexity"]
    found = [f"perplexity: {note}" for note in (p["notes"] if p else [])]
    return found + [f"{t['task']}: {note}" for t in record["tasks"] for note in t["notes"]]


NAMES_WIDTH, COLUMN_WIDTH = 24, 21  # of the figures' names; of a variant, whose widest cell is an interval


def comparison(found: Comparison, width: int) -> list[Table]:
    """Figures of all variants, a column each; as many tables as a terminal of that width needs."""
    count = max(2, (width - NAMES_WIDTH) // COLUMN_WIDTH)
    return [_columns(found, found.rows[i : i + count]) for i in range(0, len(found.rows), count)]


def _columns(found: Comparison, rows: Seq[Row]) -> Table:
    turns = "in turns" if found.interleaved else "one after the other: not all fit in memory"
    made = _table(f"against {found.baseline.label}; draft: {found.draft}; speed {turns}")
    made.add_column("", no_wrap=True)
    for row in rows:
        made.add_column(row.label.replace(" ", "\n"), justify="right")
    for name, cell in _figures(found):
        cells = [cell(row) for row in rows]
        if any(cells):
            made.add_row(name, *cells)
    return made


def _figures(found: Comparison) -> list[tuple[str, Callable[[Row], str]]]:
    seed = found.asked.settings.seed
    tasks = [r.task for r in found.baseline.quality.results]
    figures: list[tuple[str, Callable[[Row], str]]] = [
        ("checkpoint MB", lambda r: f"{r.disk_bytes / 1e6:.1f}"),
        ("weights MB", lambda r: f"{r.speed.weight_bytes / 1e6:.1f}"),
        ("KV bytes a token", lambda r: f"{r.speed.kv_row_bytes:.0f}"),
        ("memory added MB", lambda r: f"{r.memory.added / 1e6:.1f}"),
        ("perplexity", lambda r: _perplexity(r, seed)),
        ("  over the baseline's", lambda r: "" if r.ratio is None else _value(*r.ratio, ".4f")),
        ("bits a byte", lambda r: "" if r.quality.perplexity is None else f"{r.quality.perplexity.bits_per_byte:.4f}"),
    ]
    for i, task in enumerate(tasks):
        figures.append((task, partial(_task, i=i, seed=seed)))
        figures.append(("  less the baseline's", partial(_difference, task=task)))
    figures += [
        ("tokens/s", lambda r: f"{r.speed.tokens_per_s:.1f}"),
        ("tokens/s drafted for", lambda r: f"{r.speed.drafted_tokens_per_s:.1f}"),
        (f"c({CHAIN})", lambda r: f"{r.speed.c:.2f}"),
        ("accepted as target", lambda r: _rate(r.as_target)),
        ("  per draft", lambda r: _length(r.as_target)),
        ("accepted as draft", lambda r: "-" if r.as_draft is None else _rate(r.as_draft)),
        ("  per draft", lambda r: "" if r.as_draft is None else _length(r.as_draft)),
    ]
    return figures


def _value(value: float, interval: Interval, form: str) -> str:
    low, high = interval
    return f"{value:{form}}" if low != low else f"{value:{form}}\n({low:{form}} .. {high:{form}})"


def _perplexity(row: Row, seed: int) -> str:
    p = row.quality.perplexity
    return "" if p is None else _value(p.perplexity, p.interval(seed), ".2f")


def _task(row: Row, i: int, seed: int) -> str:
    result = row.quality.results[i]
    return _value(result.value, result.interval(seed), ".1%")


def _difference(row: Row, task: str) -> str:
    return _value(*row.differences[task], "+.1%") if task in row.differences else ""


def _rate(a: DraftAcceptance) -> str:
    return "nothing drafted" if a.rate is None else _value(a.rate, a.interval, ".1%")


def _length(a: DraftAcceptance) -> str:
    return "" if a.length is None else f"{a.length:.2f}"


def compared(records: Seq[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a comparison's records, a row each, the baseline first: what the docs show."""
    tasks = [t["task"] for t in records[0]["tasks"]]
    head = ["", "weights MB", "perplexity", "over the baseline's", *tasks, "tokens/s", "drafted for", f"c({CHAIN})"]
    head += ["accepted as target", "per draft", "accepted as draft", "per draft"]
    rows = []
    for r in records:
        c, p = r["comparison"], r["perplexity"]
        row = [r["config"]["label"], f"{c['weight_bytes'] / 1e6:.1f}"]
        row.append("" if p is None or p["value"] is None else f"{p['value']:.2f}")
        row.append("" if c["perplexity_ratio"] is None else _stored(c["perplexity_ratio"], ".4f"))
        row += [_stored(t, ".1%") for t in r["tasks"]]
        row += [f"{c['tokens_per_s']:.0f}", f"{c['drafted_tokens_per_s']:.0f}", f"{c[f'c{CHAIN}']:.2f}"]
        for role in (c["as_target"], c["as_draft"]):
            rate = None if role is None else role["acceptance_rate"]
            row += ["", ""] if rate is None else [f"{rate:.1%}", f"{role['mean_acceptance_length']:.2f}"]
        rows.append(row)
    return head, rows


def _stored(pair: Mapping[str, Any], form: str) -> str:
    low, high = pair["interval"] or NONE
    if pair["value"] is None:
        return "not finite"
    return _value(pair["value"], (low, high), form).replace("\n", " ")


def said(found: Comparison) -> tuple[list[str], list[str], list[str]]:
    """Warnings, recommendations and notes of a comparison, each with its variant's name."""

    def of_quality(q: Quality) -> list[str]:
        return [f"perplexity: {n}" for n in q.notes] + [f"{r.task}: {n}" for r in q.results for n in r.notes]

    def each(pick: Callable[[Row], Seq[str]]) -> list[str]:
        return [f"{row.label}: {line}" for row in found.rows for line in pick(row)]

    return (
        each(lambda r: r.warnings),
        each(lambda r: [f"keep in higher precision: {', '.join(a.modules)} ({a.reason})" for a in r.advice]),
        sorted({*each(lambda r: r.notes), *(n for r in found.rows for n in of_quality(r.quality))}),
    )
