"""What a study says: its cells, and from their records tables, plots and the published figures beside ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from sameseed.studies._setup import StudySetup

WIDTH = 20  # tokens a bar of the histogram of prompts
Records = Seq[Mapping[str, Any]]
Tell = Callable[[str], None]


class Cell(Protocol):
    """One point of a grid: what is measured together, written together, and skipped where it is there already."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float:
        """How long it takes against others, in ways to decode."""
        ...

    def check(self, setup: StudySetup) -> None:
        """Raise SameseedError where it cannot run, before anything is loaded."""

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """Its records."""
        ...


@dataclass(frozen=True)
class Published:
    """A published figure, and ours; None: not measured."""

    what: str
    theirs: float
    ours: float | None
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A line, or bars of one colour. What was published stands beside ours of the same label, dashed or hatched."""

    label: str
    points: Seq[tuple[Any, float]]
    published: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram; `level`: a line across it, as at 1 for no gain; `stacked`: bars one on the other."""

    title: str
    x: str
    series: Seq[Series]
    bars: bool = False
    level: float | None = None
    stacked: bool = False


@dataclass(frozen=True)
class Plot:
    """Panels in one picture, `name`.png and .svg."""

    name: str
    title: str
    panels: Seq[Panel]


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column names, the others are numbers."""

    title: str
    heads: Seq[str]
    rows: Seq[Seq[str]]


@dataclass(frozen=True)
class Report:
    """What records come to. `findings`: what a reader should know first."""

    findings: Seq[str]
    published: Seq[Published]
    plots: Seq[Plot]
    tables: Seq[Table]


@dataclass(frozen=True)
class Study:
    """A published study. `differs`: what makes their figures and ours unlike; `data`: theirs, and how to get it."""

    title: str
    source: str
    differs: Seq[str]
    data: str
    cells: Callable[[str], Seq[Cell]]  # by size
    report: Callable[[Records], Report]


def pick(records: Records, **wanted: object) -> list[Mapping[str, Any]]:
    """Records with these values, of their configuration's fields or of their own."""
    return [r for r in records if all(r["config"].get(k, r.get(k)) == v for k, v in wanted.items())]


def only(records: Records, **wanted: object) -> Mapping[str, Any] | None:
    """The one with these values; None where there is none."""
    found = pick(records, **wanted)
    return found[-1] if found else None


def same_text(record: Mapping[str, Any]) -> bool | None:
    """Did speculation write plain decoding's texts? None for a record of plain decoding."""
    if (pair := record.get("same_texts")) is not None:
        return bool(pair[0] == pair[1])
    return record.get("equals_plain") if record.get("way") else None


def figure(value: object, form: str = ".2f") -> str:
    """A number as text; nothing for None."""
    return "" if value is None else format(value, form)


def points(records: Iterable[Mapping[str, Any]], x: str, y: Callable[[Any], float | None]) -> list[tuple[Any, float]]:
    """(x, y) of each record that has both, in order of x, which its configuration holds."""
    found = [(r["config"][x], v) for r in records if (v := y(r)) is not None]
    return sorted(found)


def prompt_panel(records: Records) -> Panel:
    """How many prompts have how many tokens, a bar for each `WIDTH`."""
    counts = Counter(n // WIDTH * WIDTH for n in records[-1]["prompt_tokens"])
    bars = [(f"{low}+", float(counts[low])) for low in sorted(counts)]
    return Panel(f"prompts by tokens, {WIDTH} a bar", "tokens", [Series("prompts", bars)], True)
