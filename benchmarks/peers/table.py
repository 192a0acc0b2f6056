"""The peers' tables in Markdown. `python benchmarks/peers/table.py RECORDS.jsonl` prints the newest of each shape."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence as Seq
from pathlib import Path
from statistics import median
from typing import Any

from sameseed_lab.studies import rivals

SCHEMA = "sameseed.peers/1"
RATIO_ROWS = (1, 8, 16)


def markdown(head: Seq[str], rows: Iterable[Seq[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def repetitions(arm: dict[str, Any], what: str | int) -> list[float]:
    """Costs of one arm by repetition, lower is better: milliseconds of a pass over `what` rows, or seconds a token."""
    if isinstance(what, int):
        return next((list(x["ms"]) for x in arm["rows"] if x["rows"] == what), [])
    return [1 / rate for rate in (arm[what] or {"tokens_per_s": []})["tokens_per_s"]]


def faster(ours: dict[str, Any], peer: dict[str, Any], what: str | int) -> float | None:
    """The peer's time over ours: the median of the ratios within each round; None without measurements."""
    pairs = list(zip(repetitions(peer, what), repetitions(ours, what)))
    return median(theirs / mine for theirs, mine in pairs) if pairs else None


def number(value: float | None, digits: int = 1) -> str:
    """A number as a table cell; a dash if it was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def times_table(group: dict[str, Any], rows: Seq[int]) -> str:
    """Table of each arm: milliseconds of a pass by rows, c(8), prefill, batch, load time and memory."""
    head = ["engine", *[f"M={m} ms" for m in rows], "c(8)", "prefill tok/s", "batch tok/s", "load s", "peak GiB"]
    body = []
    for arm in group["arms"]:
        at = {x["rows"]: x["median"] for x in arm["rows"]}
        curve = at[8] / at[1] if 8 in at and 1 in at else None
        rates = [number((arm[what] or {}).get("median"), 0) for what in ("prefill", "batch")]
        peak = arm["peak_rss_bytes"] and arm["peak_rss_bytes"] / 2**30
        times = [number(at.get(m)) for m in rows]
        body.append([arm["name"], *times, number(curve, 2), *rates, number(arm["load_s"]), number(peak)])
    return markdown(head, body)


def ratio_table(group: dict[str, Any], rows: Seq[int]) -> str:
    """Table of speed ratios: each of sameseed's formats over each peer."""
    shown: list[tuple[str, str | int]] = [(f"M={m}", m) for m in RATIO_ROWS if m in rows]
    shown += [("prefill", "prefill"), ("batch", "batch")]
    ours = [arm for arm in group["arms"] if arm["engine"] == "sameseed"]
    peers = [arm for arm in group["arms"] if arm["engine"] != "sameseed"]
    body = [
        [f"{mine['name']} / {peer['name']}", *[number(faster(mine, peer, what), 2) for _, what in shown]]
        for mine in ours
        for peer in peers
    ]
    return markdown(["times faster", *[title for title, _ in shown]], body)


def texts_table(record: dict[str, Any], group: dict[str, Any]) -> str:
    """Table of one group's texts: tokens per second of each arm, as in `sameseed study rivals`."""
    arms = rivals.split({**record, "groups": [group]})
    found = rivals.text_table(rivals.derive([arm for arm in arms if arm["texts"]]))
    return markdown(found.heads, found.rows)


def notes(record: dict[str, Any]) -> str:
    """Notes under the tables: machine, versions, and what could not be measured and why."""
    machine, plan = record["machine"], record["plan"]
    versions: dict[str, str] = {}
    missing = []
    foreign = []
    for group in record["groups"]:
        for arm in group["arms"]:
            versions.update(arm["versions"])
            missing += [f"{arm['name']}: no {what}: {why}" for what, why in arm["missing"].items() if what != "probe"]
            foreign += [arm["foreign_cpu"]] if arm["foreign_cpu"] is not None else []
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if name != "commit")
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {plan['threads']} threads, {record['run'][:10]}, "
        f"commit {record['commit']}; {listed}.",
        texts_note(record) if record.get("prompts") else passes_note(plan),
    ]
    if foreign:
        lines.append(
            f"Other processes took up to {100 * max(foreign):.0f} % of one core (median of an engine's turns)."
        )
    return "\n".join(lines) + "".join(f"\n* {line}" for line in missing)


def passes_note(plan: dict[str, Any]) -> str:
    """A note that explains the measurements of passes, prefill and batch."""
    return (
        f"M new tokens at context {plan['context']}: median of {plan['rounds']} rounds; prefill of {plan['prefill']} "
        f"tokens and decoding of {plan['batch']} sequences at context {plan['batch_context']}: median of "
        f"{plan['slow_rounds']}. Ratios are medians of the ratios within each round."
    )


def texts_note(record: dict[str, Any]) -> str:
    """A note that explains the measurement of texts."""
    plan, prompts = record["plan"], record["prompts"]
    return (
        f"Greedy texts after {prompts['count']} prompts ({prompts['from']}), at most {plan['text_tokens']} tokens; "
        f"rounds: {plan['slow_rounds']}. Prompt by prompt in turns, the prompt's own time counts. Medians over texts; "
        "ratios are medians of each text's ratio. Plain: the same engine, weights and format without speculation."
    )


def render(record: dict[str, Any]) -> str:
    """All tables of one record."""
    rows = record["plan"]["rows"]
    parts = [f"**{record['shape']}**"]
    for group in record["groups"]:
        parts.append(f"*{group['name']}*")
        if record.get("prompts"):
            parts.append(texts_table(record, group))
            continue
        parts.append(times_table(group, rows))
        if any(arm["engine"] != "sameseed" for arm in group["arms"]):
            parts.append(ratio_table(group, rows))
    return "\n\n".join([*parts, notes(record)])


def newest(path: Path) -> list[dict[str, Any]]:
    """The last record of each shape. Raises ValueError naming a line with another schema."""
    found: dict[str, dict[str, Any]] = {}
    for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record = json.loads(line)
        if record.get("schema") != SCHEMA:
            raise ValueError(f"{path.name}, line {line_number}: schema {record.get('schema')!r} instead of {SCHEMA!r}")
        found[record["shape"]] = record
    return list(found.values())


if __name__ == "__main__":
    print("\n\n".join(render(record) for record in newest(Path(sys.argv[1]))))
