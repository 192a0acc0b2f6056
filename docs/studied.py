"""Sections from the studies' records, for the markers `study:NAME`."""

from __future__ import annotations

import textwrap

from recorded import Record, lines, markdown

from sameseed_lab.studies import _page, _runner
from sameseed_lab.studies._setup import SIZES

SAID = {"small": "the embedded family", "true": "twins at true shapes"}


def section(name: str) -> str:
    """A study's section: its source, and for each size our results beside the published ones, or the command to run."""
    study, found = _runner.load(name), lines(f"studies/{name}")
    parts = [wrapped(f"After {study.source}.")]
    for size in SIZES:
        mine = newest([r for r in found if r["size"] == size])
        command = f"`sameseed study {name} --size {size} --out benchmarks/results/studies`"
        parts.append(
            shown(name, size, mine) if mine else wrapped(f"{SAID[size].capitalize()}: not run yet. {command} runs it.")
        )
    return "\n\n".join(parts) + "\n"


def newest(found: list[Record]) -> list[Record]:
    """The records of each cell's last measurement: those of its last settings and commit."""
    last = {r["cell"]: (r["digest"], r["commit"]) for r in found}
    return [r for r in found if (r["digest"], r["commit"]) == last[r["cell"]]]


def shown(name: str, size: str, found: list[Record]) -> str:
    """The results at one size: findings, a table of published and own figures, the machine."""
    report = _runner.load(name).report(found)
    heads = ("figure", "published", "ours", "ours / published")
    rows = [
        [p.what + (f" ({p.note})" if p.note else ""), f"{p.theirs:.3g}", f"{p.ours:.3g}", f"{p.ours / p.theirs:.2f}"]
        for p in report.published
        if p.ours is not None
    ]
    missing = len(report.published) - len(rows)
    left = f" Published figures not measured here: {missing}." if missing else ""
    parts = [wrapped(f"**{SAID[size].capitalize()}.** {' '.join(report.findings)}")]
    parts += [markdown(heads, rows, (1, 2, 3))] if rows else []
    if not report.published:  # no published figures: show our own tables
        parts += [markdown(table.heads, table.rows, tuple(range(1, len(table.heads)))) for table in report.tables]
    timed = [r for r in found if "repetitions" in r] or found[-1:]
    last = {r["config"].get("workload"): r for r in timed}  # the last measurement of each workload
    about = [f"{_page.ours(r)}. {r['time'][:10]}, commit {r['commit']}." for r in last.values()]
    return "\n\n".join([*parts, wrapped(" ".join(a[0].upper() + a[1:] for a in about) + left)])


def wrapped(text: str) -> str:
    """The text wrapped to lines of at most 120 characters."""
    return textwrap.fill(text, 120)
