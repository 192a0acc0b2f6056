"""The definition of a study: its cells, and a report with tables, plots and published figures beside ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from sameseed.report.plot import Panel as Panel, Series as Series
from sameseed_lab.studies._setup import StudySetup

WIDTH = 20  # tokens per bar in the histogram of prompt lengths
Records = Seq[Mapping[str, Any]]
Tell = Callable[[str], None]


class Cell(Protocol):
    """One point of a grid. It is measured and recorded as a whole, and skipped if its records exist."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float:
        """Relative running time, in units of one way to decode."""
        ...

    def check(self, setup: StudySetup) -> None:
        """Raise SameseedError if the cell cannot run, before anything is loaded."""

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """Measure the cell and return its records."""
        ...


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


@dataclass(frozen=True)
class Study:
    """A published study. `differs`: how their setup differs from ours. `data`: their data, and how to get it."""

    title: str
    source: str
    differs: Seq[str]
    data: str
    cells: Callable[[str], Seq[Cell]]  # by size
    report: Callable[[Records], Report]


def pick(records: Records, **wanted: object) -> list[Mapping[str, Any]]:
    """Records whose fields have the `wanted` values. A field is looked up in the config first, then in the record."""
    return [r for r in records if all(r["config"].get(k, r.get(k)) == v for k, v in wanted.items())]


def only(records: Records, **wanted: object) -> Mapping[str, Any] | None:
    """The last record with the `wanted` values; None if there is none."""
    found = pick(records, **wanted)
    return found[-1] if found else None


def same_text(record: Mapping[str, Any]) -> bool | None:
    """Whether speculation generated plain decoding's texts; None for a record of plain decoding."""
    if (pair := record.get("same_texts")) is not None:
        return bool(pair[0] == pair[1])
    return record.get("equals_plain") if record.get("way") else None


def figure(value: object, form: str = ".2f") -> str:
    """A number as text; "" for None."""
    return "" if value is None else format(value, form)


def points(records: Iterable[Mapping[str, Any]], x: str, y: Callable[[Any], float | None]) -> list[tuple[Any, float]]:
    """(x, y) of each record with a y, in order of x. `x` is a field of the record's config."""
    found = [(r["config"][x], v) for r in records if (v := y(r)) is not None]
    return sorted(found)


def prompt_panel(records: Records) -> Panel:
    """Histogram of prompt lengths, one bar per `WIDTH` tokens."""
    counts = Counter(n // WIDTH * WIDTH for n in records[-1]["prompt_tokens"])
    bars = [(f"{low}+", float(counts[low])) for low in sorted(counts)]
    return Panel(f"prompts by tokens, {WIDTH} a bar", "tokens", [Series("prompts", bars)], "bars")
