"""Sections from the studies' records, for the markers `study:NAME`."""

from __future__ import annotations

import textwrap

from recorded import Record, last_of_each, lines, markdown, origins

from sameseed_lab.studies import _page, _runner
from sameseed_lab.studies._setup import SIZES

SAID = {"small": "the embedded family", "real": "real models", "true": "twins at true shapes"}


def section(name: str) -> str:
    """A study's section: its source, what the largest size showed, and how to run larger ones."""
    study = _runner.load(name)
    parts = [f"After {study.source}."]
    best = largest(name)
    for size in SIZES[SIZES.index(best[0]["size"]) + 1 :] if best else SIZES:
        command = f"`sameseed study {name} --size {size} --out benchmarks/results/studies`"
        parts.append(f"{SAID.get(size, size).capitalize()}: not run yet. {command} runs it.")
    if best:
        parts.insert(1, shown(name, best[0]["size"], best))
    if name == "rivals" and best:  # no published figures: our own last table
        table = _runner.load(name).report(best).tables[-1]
        parts.append(markdown(table.heads, table.rows, range(1, len(table.heads))))
    return "\n\n".join(part if part.startswith("|") else textwrap.fill(part, 120) for part in parts) + "\n"


def cells(name: str, size: str) -> list[Record]:
    """The records of each cell's last measurement at a size: those of its last settings and commit."""
    found = [r for r in lines(f"studies/{name}") if r["size"] == size]
    last = {r["cell"]: (r["digest"], r["commit"]) for r in found}
    return [r for r in found if (r["digest"], r["commit"]) == last[r["cell"]]]


def largest(name: str) -> list[Record]:
    """The records of the largest size that was measured."""
    return next((found for size in reversed(SIZES) if (found := cells(name, size))), [])


def shown(name: str, size: str, found: list[Record]) -> str:
    """What was found at one size, with how many published figures ours stand beside, and where from."""
    report = _runner.load(name).report(found)
    ratios = sum(p.ours is not None for p in report.published)
    beside = f" The study's page has {ratios} published figures beside ours." if ratios else ""
    timed = [r for r in found if "repetitions" in r] or found[-1:]
    last = last_of_each(timed, lambda r: (r["config"].get("workload"), r["commit"]))
    about = " ".join(dict.fromkeys(f"{_page.ours(r)[0].upper()}{_page.ours(r)[1:]}." for r in last))
    return f"**{SAID.get(size, size).capitalize()}.** {' '.join(report.findings)}{beside} {about} {origins(last)}"
