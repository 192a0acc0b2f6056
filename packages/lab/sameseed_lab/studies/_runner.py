"""The runner of all studies: measures a grid cell by cell, skips recorded cells, and writes plots and an HTML page."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sameseed import ops, registry
from sameseed.errors import ConfigError, SameseedError
from sameseed.report import plot as drawing, record
from sameseed.report.page import templates
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Cell, Records, Report, Study, same_text

SPREAD = "Bands and lines: the least and the most of several runs; of quality: 95 % intervals. Published: grey."
_TEMPLATES = templates(
    Path(__file__).parent,
    tone="passed",
    number=lambda value: f"{value:.3g}",
    picture=lambda panel: base64.b64encode(drawing.svg(panel)).decode(),
    spread=SPREAD,
)


@dataclass(frozen=True)
class Planned:
    """A cell with its digest. `done`: whether it has records already. `wrong`: why it cannot run, or ""."""

    cell: Cell
    digest: str
    done: bool
    wrong: str = ""


def load(name: str) -> Study:
    """A study by its name. Raises RegistryError that suggests the nearest name."""
    found: Study = registry.load("studies", name).STUDY
    return found


def _read(name: str, setup: StudySetup) -> list[dict[str, Any]]:
    file = setup.out / f"{name}.jsonl"
    return record.read(file, skip_broken=True) if file.exists() else []


def plan(name: str, setup: StudySetup, only: Seq[str] = ()) -> list[Planned]:
    """The cells of the grid; no model is loaded. `only`: patterns of cell names. Raises ConfigError if none matches."""
    study = load(name)
    record.require("a study", "study", "matplotlib")  # it draws its plots after the last cell
    every = study.cells(setup)
    try:
        setup.read()
    except ConfigError as error:
        raise ConfigError(f"{error}; {study.data}") from None
    chosen = [c for c in every if not only or any(fnmatch(c.name, f"*{p}*") for p in only)]
    if not chosen:
        names = ", ".join(c.name for c in every)
        raise ConfigError(f"--only {' '.join(only)} leaves no cell of {name} (there are: {names})")
    for needed in dict.fromkeys(getattr(c, "needs", ()) for c in chosen):  # extras, before the first measurement
        record.require(f"study {name}", *needed) if needed else None
    known = {r.get("digest") for r in _read(name, setup)}
    planned = []
    for cell in chosen:
        digest, wrong = setup.digest(cell), ""
        try:
            cell.check(setup)
        except SameseedError as error:
            wrong = str(error)
        planned.append(Planned(cell, digest, digest in known, wrong))
    return planned


def run(name: str, setup: StudySetup, planned: Seq[Planned], tell: Callable[[str], None]) -> list[Planned]:
    """Measure the cells that are neither done nor impossible; returns them, those that failed with their errors."""
    file = setup.out / f"{name}.jsonl"
    record.prepare(file)
    if setup.threads is not None:
        ops.set_num_threads(setup.threads)
    todo, failed = [p for p in planned if not p.done and not p.wrong], dict[str, str]()
    spent = weight = 0.0
    for number, p in enumerate(todo, 1):
        rest = sum(q.cell.weight for q in todo[number - 1 :])
        ahead = f", about {spent / weight * rest / 60:.0f} min to go" if weight else ""
        tell(f"{number} of {len(todo)}{ahead}: {p.cell.name}")
        start = time.monotonic()
        try:
            found = p.cell.measure(setup, tell)
        except Exception as error:  # any cause: a failed cell is named, and the others are still to measure
            failed[p.digest] = str(error) if isinstance(error, SameseedError) else f"{type(error).__name__}: {error}"
            tell(f"failed: {p.cell.name}: {failed[p.digest]}")
            continue
        for made in found:
            own = {"models": dict(setup.names)} if setup.size == "real" else {}
            where = {"study": name, "size": setup.size, "cell": p.cell.name, "digest": p.digest}
            record.append(file, {**made, **where, **own})
        spent, weight = spent + time.monotonic() - start, weight + p.cell.weight
    return [replace(p, wrong=failed.get(p.digest, p.wrong)) for p in planned]


def write(name: str, setup: StudySetup, planned: Seq[Planned]) -> tuple[list[Path], bool]:
    """Write plots and page; returns the files, and whether all texts equal plain ones. ConfigError without records."""
    study, wanted = load(name), {p.digest for p in planned}
    found = [r for r in _read(name, setup) if r.get("digest") in wanted]
    if not found:
        raise ConfigError(f"nothing of {name} is measured; `sameseed study {name} --dry-run` says what cannot run")
    report = study.report(found)
    last = _last(found)
    about = drawing.source(last, f"{setup.num_prompts} prompts, {setup.repeat} x interleaved", SPREAD)
    drawn = list[Path]()
    who = " + ".join(setup.names.values()) if setup.size == "real" else f"{name}, {setup.size}"
    for p in report.plots:
        title = f"{p.title}: {who}, {machine(last)}"
        drawn += drawing.draw(p.panels, setup.out / f"{name}-{p.name}", title, about, p.columns)
    page = setup.out / f"{name}.html"
    left_out = [
        (p.cell.name, p.wrong or "not measured yet") for p in planned if p.digest not in {r["digest"] for r in found}
    ]
    page.write_text(render(name, study, report, found, left_out), encoding="utf-8")
    return [page, *drawn], all(same_text(r) is not False for r in found)


def _last(records: Records) -> Mapping[str, Any]:
    """The last record of speed, or else the last of all."""
    return next((r for r in reversed(records) if "repetitions" in r), records[-1])


def render(name: str, study: Study, report: Report, records: Records, left_out: Seq[tuple[str, str]]) -> str:
    """The HTML page. `left_out`: names of cells without records, with the reason."""
    last = _last(records)
    drafted = [same for r in records if (same := same_text(r)) is not None]
    facts: dict[str, Any] = {**last["machine"], "commit": last["commit"], "time": last["time"], "size": last["size"]}
    loads = [r["machine"]["load_1min"] for r in records]
    facts["load in the minute before each cell"] = f"{min(loads):g} to {max(loads):g}" if loads else ""
    return _TEMPLATES.get_template("study.html").render(
        title=f"Study: {name}",
        head=study.title,
        study=study,
        report=report,
        ours=ours(last),
        busy=any(r["machine"]["load_1min"] > r["machine"]["cores"] + 1 for r in records),
        compared=len(drafted),
        unequal=drafted.count(False),
        left_out=left_out,
        machine=facts,
    )


def ours(last: Mapping[str, Any]) -> str:
    """The machine and the workload of our measurement in one line."""
    c = last["config"]
    if "repetitions" not in last:
        return f"{c['model']} on {last['machine']['cpu']}; no speed was measured"
    kinds = {"small": "the embedded family", "true": "twins of the embedded family at true shapes"}
    kind = kinds.get(last["size"]) or " with ".join(last["models"].values())
    if "workload" in c:
        return f"{c['workload'].replace('own, ', f'{kind}, ', 1)}; {last['machine']['cpu']}"
    count = f"{c['num_prompts']} prompts" if "num_prompts" in c else f"{c['num_requests']} requests at the most clients"
    return (
        f"{kind} on {machine(last)}; {count}, at most "
        f"{c['max_tokens']} tokens each, {len(last['repetitions'])} x interleaved, medians"
    )


def machine(record: Mapping[str, Any]) -> str:
    """The machine of a record: its GPU, or its processor and threads."""
    its = record["machine"]
    return str(its.get("gpu") or f"{its['cpu']}, {its['threads']} thread{'s' * (its['threads'] > 1)}")
