"""What a study is: cells, and a TOML file of published figures, texts and plots, by fields of rows (flat records)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from sameseed.fields import tomllib
from sameseed.report.plot import Panel, Series, shown
from sameseed_lab.studies._setup import StudySetup, role_name

Record = Mapping[str, Any]
Records = Seq[Record]
Row = dict[str, Any]
Tell = Callable[[str], None]


class Cell(Protocol):
    """One point of a grid. It is measured and recorded as a whole, and skipped if its records exist."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...  # relative running time, in units of one way to decode

    def check(self, setup: StudySetup) -> None:
        """Raise SameseedError if the cell cannot run, before anything is loaded."""

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]: ...  # its records


@dataclass(frozen=True)
class Published:
    """A published figure and our own (None: not measured)."""

    what: str
    theirs: float
    ours: float | None
    note: str = ""


@dataclass(frozen=True)
class Plot:
    """Panels in one image, written as STUDY-`name`.png and .svg."""

    name: str
    title: str
    panels: Seq[Panel]
    columns: int = 3


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column has names, the others have numbers."""

    title: str
    heads: Seq[str]
    rows: Seq[Seq[str]]


@dataclass(frozen=True)
class Report:
    """The evaluation of a study's records. `findings`: sentences with the main results."""

    findings: Seq[str]
    published: Seq[Published]
    plots: Seq[Plot]
    tables: Seq[Table]


class Study:
    """A published study. `differs`: how their setup differs from ours. `data`: their data, and how to get it.

    These texts, and the `layout` (measures, figures, plots and tables: docs/guides/studies.md), are in the TOML file
    beside its module `file`. `derive` makes rows of records; `findings` says the main results; `more` adds plots and
    tables that are not made of one field a row.
    """

    def __init__(
        self,
        file: str,
        cells: Callable[[StudySetup], Seq[Cell]],
        derive: Callable[[Records], list[Row]],
        findings: Callable[[list[Row]], list[str]],
        more: Callable[[list[Row]], tuple[list[Plot], list[Table]]] = lambda rows: ([], []),
    ) -> None:
        self.cells, self.derive, self.findings, self.more = cells, derive, findings, more
        self.layout = tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))
        self.title, self.source, self.data = (str(self.layout[key]) for key in ("title", "source", "data"))
        self.differs: Seq[str] = self.layout["differs"]

    def report(self, records: Records) -> Report:
        """Our results beside the published ones. Plots have what was measured, and nothing published without ours."""
        rows = self.derive(records)
        theirs = [row for part in self.layout.get("figures", ()) for row in _published_rows(part)]
        published = [p for row in theirs for p in self._beside(row, rows)]
        plots, tables = self.more(rows)
        drawn = [self._plot(p, rows, theirs) for p in self.layout.get("plots", ())]
        told = [
            _table(t, found) for t in self.layout.get("tables", ()) if (found := matching(rows, t.get("where", {})))
        ]
        plots = [replace(p, panels=panels) for p in (*drawn, *plots) if (panels := shown(p.panels))]
        return Report(self.findings(rows), published, plots, [*told, *tables])

    def _beside(self, theirs: Row, rows: list[Row]) -> list[Published]:
        part, made = theirs["part"], []
        ours = _same_setting(rows, theirs)
        for name in part["measures"]:
            what = part["what"].format(**theirs)
            what += f": {self.layout['measures'][name]['title']}" if len(part["measures"]) > 1 else ""
            made.append(Published(what, theirs[name], ours[-1].get(name) if ours else None, part.get("note", "")))
        return made

    def _plot(self, plot: Mapping[str, Any], rows: list[Row], theirs: list[Row]) -> Plot:
        """A panel for each measure and, where the plot is split by a field, each of that field's values."""
        panels, by = [], plot.get("split", "")
        mine = matching(rows, plot.get("where", {}))
        beside = [t for t in theirs if t["part"].get("plot") == plot["name"] and _same_setting(mine, t)]
        values = dict.fromkeys(row.get(by) for row in mine)
        for name in plot["measures"]:
            said = self.layout["measures"][name]
            for value in values:
                ours = [row for row in mine if row.get(by) == value]
                others = [row for row in beside if row.get(by) in (None, value)]
                series = [*_series(ours, plot, name, plot["by"]), *_series(others, plot, name, "{label}", True)]
                part = value and ours[-1][plot.get("split_title", by)]
                title = f"{said['title']}, {part}" if part else said["title"]
                level, kind = said.get("level"), plot.get("kind", "lines")
                panels.append(Panel(title, plot.get("x_title", ""), series, kind, level=level))
        return Plot(plot["name"], plot["title"], panels, len(values) if len(values) in (2, 3) else 3)


def _published_rows(part: Mapping[str, Any]) -> Iterable[Row]:
    """The figures of one part, each as a row with `label`, its series in plots."""
    for values in part["rows"]:
        row = {
            **part.get("where", {}),
            **dict(zip((*part["keys"], *part["measures"]), values, strict=True)),
            "part": part,
        }
        row["role"] = str(row.get("way", "")).strip("{}").upper()
        yield {**row, "label": part.get("label", "").format(**row)}


def _same_setting(rows: Iterable[Row], theirs: Row) -> list[Row]:
    """Our rows of a published figure's setting."""
    part = theirs["part"]
    return matching(rows, {**part.get("where", {}), **{key: theirs[key] for key in part["keys"]}})


def _series(rows: Seq[Row], plot: Mapping[str, Any], name: str, by: str, published: bool = False) -> list[Series]:
    """A series for each label, from the rows that have the measure; rows of one x count as runs of one setting."""
    found: dict[str, dict[Any, list[Row]]] = {}
    for row in rows:
        if row.get(name) is not None and row.get(plot["x"]) is not None:
            found.setdefault(by.format(**row), {}).setdefault(row[plot["x"]], []).append(row)
    made = []
    for label, groups in found.items():
        places = sorted(groups) if plot.get("kind", "lines") == "lines" else list(groups)
        each = [[v for row in groups[x] for v in (row.get(f"{name}_each") or [row[name]])] for x in places]
        points = [(x, float(median(row[name] for row in groups[x]))) for x in places]
        spread = [(min(*values, y), max(*values, y)) for values, (_, y) in zip(each, points)]
        made.append(Series(label, points, published, () if published else spread))
    return made


def _table(table: Mapping[str, Any], rows: Seq[Row]) -> Table:
    heads = [head for head, _, _ in table["columns"]]
    return Table(
        table["title"], heads, [[figure(row.get(field), form) for _, field, form in table["columns"]] for row in rows]
    )


def rows_of(records: Records) -> list[Row]:
    """The records as rows, without what is derived. `draft_name`: the draft's name for tables and plots."""
    rows = []
    for r in records:
        row: Row = {**r["config"], **r, "drafted": bool(r.get("way"))}
        role = str(r.get("way") or r["config"].get("draft", "")).strip("{}")
        row["draft_name"] = (r.get("models") or {}).get(role) or role_name(role, r.get("size", "true"))
        rows.append(row)
    return rows


def matching(rows: Iterable[Row], wanted: Mapping[str, object]) -> list[Row]:
    """Rows whose fields have the `wanted` values; of texts with "*": match the pattern."""

    def has(row: Row, name: str, value: object) -> bool:
        if isinstance(value, str) and "*" in value:
            return fnmatch(str(row.get(name) or ""), value) and bool(row.get(name))
        return bool(row.get(name) == value)

    return [row for row in rows if all(has(row, name, value) for name, value in wanted.items())]


def only(rows: Iterable[Row], **wanted: object) -> Row | None:
    """The last row with the `wanted` values; None if there is none."""
    found = matching(rows, wanted)
    return found[-1] if found else None


def same_text(record: Record) -> bool | None:
    """Whether speculation generated plain decoding's texts; None for a record of plain decoding."""
    if (pair := record.get("same_texts")) is not None:
        return bool(pair[0] == pair[1])
    return record.get("equals_plain") if record.get("way") else None


def figure(value: object, form: str = ".2f") -> str:
    """A number as text; "" for None."""
    return "" if value is None else format(value, form)


def machine_use(record: Record) -> Row:
    """The derived fields `cpu` (share of all cores), `joules` (a token) and `same` (texts as plain decoding's)."""
    used, same = record["usage"], same_text(record)
    joules = used["gpu_j_per_token"] if used["gpu_j_per_token"] is not None else used["cpu_j_per_token"]
    return {"cpu": used["cpu_share"], "joules": joules, "same": {None: "", True: "yes", False: "NO"}[same]}
