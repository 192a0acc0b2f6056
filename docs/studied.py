"""Sections from the studies' records, for the markers `study:NAME`."""

from __future__ import annotations

import textwrap

from recorded import Record, last_of_each, lines, markdown, origins

from sameseed_lab.studies import _runner

SAID = {"real": "real models", "true": "twins at true shapes", "small": "the embedded family"}  # the best first


def section(name: str) -> str:
    """A study's section: its source, what was found on each target, and which sizes are missing."""
    study, found = _runner.load(name), measured(name)
    parts = [f"After {study.source}." if name != "rivals" else f"No publication: {study.source.partition('; ')[2]}."]
    for its in found:
        if its[0]["size"] != "small" or len(found) == 1:  # the embedded family stands in for others
            parts.append(shown(name, its))
            if name == "rivals":  # no published figures: our own last table
                table = study.report(its).tables[-1]
                parts.append(markdown(table.heads, table.rows, range(1, len(table.heads))))
    known = {its[0]["size"] for its in found}
    missing = [size for size in SAID if size not in known and (size != "small" or not known)]
    if missing:
        parts.append(f"Not run yet: {', '.join(f'{SAID[size]} (`--size {size}`)' for size in missing)}.")
    return "\n\n".join(part if part.startswith("|") else textwrap.fill(part, 120) for part in parts) + "\n"


def measured(name: str) -> list[list[Record]]:
    """The records of each target, real models first: of each cell the last measurement's settings and commit."""
    found = lines(f"studies/{name}")
    made = []
    for size, target in sorted(dict.fromkeys(map(target_of, found)), key=lambda key: list(SAID).index(key[0])):
        its = [r for r in found if target_of(r) == (size, target)]
        last = {r["cell"]: (r["digest"], r["commit"]) for r in its}
        made.append([r for r in its if (r["digest"], r["commit"]) == last[r["cell"]]])
    return made


def target_of(record: Record) -> tuple[str, str]:
    """A record's size, and its target where that is a real model."""
    return record["size"], record.get("models", {}).get("target", "")


def shown(name: str, found: list[Record]) -> str:
    """What was found on one target, and where from."""
    report = _runner.load(name).report(found)
    timed = [r for r in found if "repetitions" in r] or found[-1:]
    last = last_of_each(timed, lambda r: (r["config"].get("workload"), r["commit"]))
    about = " ".join(dict.fromkeys(map(ours, last)))
    what = target_of(found[0])[1] or SAID[found[0]["size"]].capitalize()
    return f"**{what}.** {' '.join(report.findings)} {about} {origins(last)}"


def ours(record: Record) -> str:
    """The workload of a record as a sentence, without its machine; a model's name keeps its first letter."""
    said = _runner.ours(record)
    for known in (f" on {_runner.machine(record)}", f"; {record['machine']['cpu']}"):
        said = said.replace(known, "")
    return f"{said if record['size'] == 'real' else said[0].upper() + said[1:]}."
