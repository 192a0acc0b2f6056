"""Check: one question with its sizes, thresholds, statistic and verdict; Effort: how much is looked at."""

from __future__ import annotations

import importlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from sameseed.laws.subject import Subject

PASSED, FAILED, WARNING, NOT_SHOWN = "passed", "failed", "warning", "not shown"
IN_PART = "these checks passed"  # of a certificate that left some out
EFFORTS = {"quick": 0.0005, "normal": 0.01, "full": 1.0}
HIDDEN = "an error that the engine did not tell of"  # it goes on without drafts, or ends one text, and logs it
MOST_FINDINGS = 5  # of a check: the first few say what is wrong
MORE = "take a higher --effort, more prompts or longer answers (--prompts, --max-tokens)"


@dataclass(frozen=True)
class Effort:
    """The share of the full sizes that is run; every check has a least size below which it would show nothing."""

    share: float
    least: float = 1.0  # share of the least sizes: for mutants, which are wrong enough to show in less

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
        """A size of this effort, at least `least`."""
        return max(1, round(least * self.least), round(full * self.share))

    def need(self, least: int) -> int:
        """The least count of evidence: below it a pass would show nothing."""
        return max(1, round(least * min(1.0, self.least)))


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be: where, what was to be expected, what was found."""

    where: str
    expected: str = ""
    found: str = ""


@dataclass
class Found:
    """What a check saw. `sizes`: what was looked at; `statistic`: what was measured; `notes`: what else to know.

    `false_alarm` bounds the probability that a right engine fails: 0 for comparisons of bits. `lacking`: evidence that
    did not come about, in words.
    """

    sizes: dict[str, int]
    statistic: dict[str, float]
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    false_alarm: float = 0.0
    unfinished: bool = False  # the check ended in an exception
    status: str | None = None  # of a check without findings; None: passed
    lacking: list[str] = field(default_factory=list)

    def add(self, where: str, expected: object = "", found: object = "") -> None:
        """Keep one of the first findings."""
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(Finding(where, str(expected), str(found)))

    @property
    def verdict(self) -> str:
        """passed, failed, warning, or not shown: nothing is wrong, but too little was seen."""
        if self.findings:
            return FAILED
        return NOT_SHOWN if self.lacking else self.status or PASSED

    def weigh(self, least: Mapping[str, int], effort: Effort) -> None:
        """Say which counts, of sizes or statistics, are below the least."""
        seen = {**self.sizes, **self.statistic}
        for name, count in least.items():
            if seen.get(name, 0) < effort.need(count):
                words = name.replace("_", " ")
                self.lacking.append(f"{words}: {seen.get(name, 0):,g}, at least {effort.need(count):,} are needed")


@dataclass(frozen=True)
class Check:
    """A question: `proves` says what a pass means, `full` the sizes at effort 1, `run` answers.

    `least`: counts below which nothing is shown; `remedy`: what to change then.
    """

    id: str
    name: str
    proves: str
    threshold: str
    full: Mapping[str, int]
    run: Callable[[Subject, Effort], Found]
    on_host: bool = False  # arithmetic of the CPU alone, wherever models are
    least: Mapping[str, int] = field(default_factory=dict)
    remedy: str = MORE

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets it by its name: that of the function that it was made of."""
        return named, (self.run.__module__, self.run.__qualname__)


def named(module: str, name: str) -> Any:
    """What a module calls so, as it is written there: `Class.member` without binding."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    return found


def check(
    id: str,
    name: str,
    threshold: str,
    *,
    least: Mapping[str, int],
    on_host: bool = False,
    remedy: str = MORE,
    **full: int,
) -> Callable[[Callable[[Subject, Effort], Found]], Check]:
    """Make a Check of the function below, whose docstring says what a pass proves."""

    def made(run: Callable[[Subject, Effort], Found]) -> Check:
        proves = " ".join((run.__doc__ or "").split())
        return Check(id, name, proves, threshold, full, run, on_host, least, remedy)

    return made


@dataclass(frozen=True)
class Result:
    """A check that was run."""

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


class _Heard(logging.Handler):
    """Keeps what was logged as an error, in a line each."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self.errors.append(record.getMessage() + (f" ({type(cause).__name__}: {cause})" if cause is not None else ""))


@contextmanager
def _errors() -> Iterator[list[str]]:
    """What the engine logs as errors meanwhile: a draft that fails costs speed, and says so nowhere else."""
    log, heard = logging.getLogger("sameseed"), _Heard()
    log.addHandler(heard)
    try:
        yield heard.errors
    finally:
        log.removeHandler(heard)


def run_check(check: Check, subject: Subject, effort: Effort) -> Result:
    """Run one check. An engine that breaks down in it has failed it; one of which too little is seen shows nothing.

    What the configured draft guessed meanwhile is counted among the sizes: of scripted trees nothing is.
    """
    start, before = time.perf_counter(), subject.metrics.copy()
    try:
        with _errors() as hidden:
            found = check.run(subject, effort)
        for error in hidden[:1]:
            found.add(HIDDEN, "none", error)
    except Exception as error:  # whatever it is: what breaks down proves nothing
        found = Found({}, {}, unfinished=True)
        found.add(f"the check could not be finished: {type(error).__name__}", "", error)
    if check.on_host:
        found.notes.append("arithmetic of the host: it ran on the CPU, whatever --device says")
    drafted = subject.metrics.since(before)
    if drafted.num_draft_tokens:
        found.sizes |= {
            "guesses": drafted.num_draft_tokens,
            "accepted": drafted.num_accepted_tokens,
            "rejections": drafted.num_rollbacks,
        }
    found.weigh(check.least, effort)
    return Result(check, found, time.perf_counter() - start)
