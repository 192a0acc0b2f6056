"""Check: one question about an engine, with sizes, thresholds and verdict. Effort: how much a run examines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING, Any

from sameseed.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from sameseed.laws.subject import Subject

PASSED, FAILED, WARNING, NOT_SHOWN = "passed", "failed", "warning", "not shown"
IN_PART = "these checks passed"  # verdict of a certificate that left some checks out
EFFORTS = {"quick": 0.0005, "normal": 0.01, "full": 1.0}
HIDDEN = "an error that was logged but not reported"  # the engine goes on without drafts, or ends a text, and logs it
# By the first word of a figure's name: how the figures of several runs are joined; others are added.
EXTREMES: Mapping[str, Callable[..., Any]] = {"most": max, "largest": max, "least": min, "smallest": min}
MOST_FINDINGS = 5  # kept for each check: the first few show what is wrong
MORE = "take prompts that the draft can continue (n-grams need repetition) or longer answers (--prompts, --max-tokens)"
TURNS = 8  # most times that a check runs, each time with other prompts and seeds, until it has seen enough


@dataclass(frozen=True)
class Effort:
    """The share of the full sizes to run; every check has a least size below which it would show nothing."""

    share: float
    least: float = 1.0  # share of the least sizes; below 1 for mutants, which are wrong enough to show in less

    @classmethod
    def parse(cls, text: str) -> Effort:
        """`quick`, `normal`, `full`, or a number above 0 (1 is full). Raises ConfigError."""
        try:
            share = EFFORTS[text] if text in EFFORTS else float(text)
        except ValueError:
            share = 0.0
        if not 0.0 < share <= 100.0:
            known = ", ".join(f"{name} ({value:g})" for name, value in EFFORTS.items())
            raise ConfigError(f"--effort must be {known} or a number above 0, got {text!r}")
        return cls(share)

    def of(self, full: int, least: int) -> int:
        """`full` scaled to this effort, but no less than `least` scaled to it."""
        return max(1, round(least * self.least), round(full * self.share))

    def need(self, least: int) -> int:
        """The least count of evidence; below it, a pass would show nothing."""
        return max(1, round(least * min(1.0, self.least)))


@dataclass(frozen=True)
class Finding:
    """One deviation: where it is, what was expected, and what was found."""

    where: str
    expected: str = ""
    found: str = ""


@dataclass
class Found:
    """What a check saw. `sizes`: how much was examined; `statistic`: what was measured; `notes`: further remarks.

    `false_alarm` bounds the probability that a correct engine fails: 0 for comparisons of bits. `lacking`: which
    evidence was too scarce, in words.
    """

    sizes: dict[str, int]
    statistic: dict[str, float]
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    false_alarm: float = 0.0
    unfinished: bool = False  # the check ended in an exception
    status: str | None = None  # verdict of a check without findings; None: passed
    lacking: list[str] = field(default_factory=list)

    def add(self, where: str, expected: object = "", found: object = "") -> None:
        """Keep a finding, unless MOST_FINDINGS are kept already."""
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(Finding(where, str(expected), str(found)))

    def wrong(self, kind: str, where: str, expected: object, found: object, count: int = 1) -> None:
        """Add `count` to the statistic `kind`, and keep a finding unless that is 0."""
        self.statistic[kind] = self.statistic.get(kind, 0) + count
        if count:
            self.add(where, expected, found)

    @property
    def verdict(self) -> str:
        """The verdict: failed, not shown (nothing is wrong, but too little was seen), warning, or passed."""
        if self.findings:
            return FAILED
        return NOT_SHOWN if self.lacking else self.status or PASSED

    def join(self, later: Found) -> None:
        """Add what a later run of the same check saw. Figures named most_ and least_ are extremes, all others sums."""
        for name in ("sizes", "statistic"):
            mine: dict[str, Any] = getattr(self, name)
            for key, value in getattr(later, name).items():
                chosen = EXTREMES.get(key.partition("_")[0])
                mine[key] = mine.get(key, 0) + value if chosen is None else chosen(mine.get(key, value), value)
        self.findings += later.findings[: MOST_FINDINGS - len(self.findings)]
        self.notes += [note for note in later.notes if note not in self.notes]
        self.false_alarm += later.false_alarm
        self.status = self.status or later.status

    def short(self, least: Mapping[str, int], effort: Effort) -> dict[str, int | float]:
        """The counts, of sizes or statistics, that are below the least needed."""
        seen = {**self.sizes, **self.statistic}
        return {name: seen.get(name, 0) for name, count in least.items() if seen.get(name, 0) < effort.need(count)}


@dataclass(frozen=True)
class Check:
    """A check: `proves` says what a pass means, `full` gives the sizes at effort 1, `run` does the work.

    `least`: counts below which a pass shows nothing; `remedy`: what the user can change then.
    """

    id: str
    name: str
    proves: str
    threshold: str
    full: Mapping[str, int]
    run: Callable[[Subject, Effort], Found]
    least: Mapping[str, int] = field(default_factory=dict)
    remedy: str = MORE


def check(
    id: str, name: str, threshold: str, *, least: Mapping[str, int], remedy: str = MORE, **full: int
) -> Callable[[Callable[[Subject, Effort], Found]], Check]:
    """Decorator that makes a Check of a function, whose docstring says what a pass proves."""

    def made(run: Callable[[Subject, Effort], Found]) -> Check:
        proves = " ".join((run.__doc__ or "").split())
        return Check(id, name, proves, threshold, full, run, least, remedy)

    return made


@dataclass(frozen=True)
class Result:
    """The result of a check that was run."""

    check: Check
    found: Found
    seconds: float

    @property
    def status(self) -> str:
        return self.found.verdict

    def as_dict(self) -> dict[str, Any]:
        c, f = self.check, self.found
        return {
            "id": c.id,
            "name": c.name,
            "proves": c.proves,
            "status": self.status,
            "sizes": f.sizes,
            "full_sizes": dict(c.full),
            "least": dict(c.least),
            "lacking": f.lacking,
            "remedy": c.remedy if f.lacking else "",
            "threshold": c.threshold,
            "statistic": f.statistic,
            "false_alarm": f.false_alarm,
            "seconds": round(self.seconds, 3),
            "notes": f.notes,
            "findings": [vars(x) for x in f.findings],
        }


@contextmanager
def _errors_count(found: Found) -> Iterator[None]:
    """Make the first error that the engine logs a finding: a failing draft costs speed and is reported nowhere else."""
    log, heard = logging.getLogger("sameseed"), BufferingHandler(sys.maxsize)
    heard.setLevel(logging.ERROR)
    log.addHandler(heard)
    try:
        yield
    finally:
        log.removeHandler(heard)
    for record in heard.buffer[:1]:
        cause = record.exc_info[1] if record.exc_info else None
        found.add(HIDDEN, "none", record.getMessage() + (f" ({type(cause).__name__}: {cause})" if cause else ""))


def run_check(check: Check, subject: Subject, effort: Effort) -> Result:
    """Run one check until it has seen enough, at most TURNS times, each time with other prompts and seeds.

    An exception counts as a failure, too little evidence as "not shown". The sizes also get the counts of the
    configured draft (drafted, accepted, rejections), without those of scripted trees.
    """
    start, before, found = time.perf_counter(), subject.metrics.copy(), Found({}, {})
    for subject.turn in range(TURNS if check.full else 1):
        short = found.short(check.least, effort)
        try:
            with _errors_count(found):
                found.join(check.run(subject, effort if not subject.turn else replace(effort, share=1e-9)))
        except (ConfigError, RequestError) as error:  # this configuration does not allow the check's requests
            found.notes.append(f"the check could not run here: {error}")
            break
        except Exception as error:  # any other exception: a check that breaks down proves nothing
            found.unfinished = True
            found.add(f"the check could not be finished: {type(error).__name__}", "", error)
        drafted = subject.metrics.since(before)
        if drafted.num_draft_tokens:
            found.sizes |= {
                "drafted": drafted.num_draft_tokens,
                "accepted": drafted.num_accepted_tokens,
                "rejections": drafted.num_rollbacks,
            }
        left = found.short(check.least, effort)
        if found.findings or not left or (subject.turn and left == short):  # a further turn would not help
            break
    found.lacking = [
        f"{name.replace('_', ' ')}: {seen:,g}, at least {effort.need(check.least[name]):,} are needed"
        for name, seen in found.short(check.least, effort).items()
    ]
    if subject.turn:
        found.notes.append(f"ran {subject.turn + 1} times (at most {TURNS}) to see enough")
    subject.turn = 0
    return Result(check, found, time.perf_counter() - start)
