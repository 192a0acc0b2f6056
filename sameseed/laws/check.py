"""Check: one question about an engine, with sizes, thresholds and verdict. Effort: how much a run examines."""

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
IN_PART = "these checks passed"  # verdict of a certificate that left some checks out
EFFORTS = {"quick": 0.0005, "normal": 0.01, "full": 1.0}
HIDDEN = "an error that the engine did not tell of"  # the engine goes on without drafts, or ends a text, and logs it
MOST_FINDINGS = 5  # kept for each check: the first few show what is wrong
MORE = "take a higher --effort, more prompts or longer answers (--prompts, --max-tokens)"


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

    @property
    def verdict(self) -> str:
        """The verdict: failed, not shown (nothing is wrong, but too little was seen), warning, or passed."""
        if self.findings:
            return FAILED
        return NOT_SHOWN if self.lacking else self.status or PASSED

    def weigh(self, least: Mapping[str, int], effort: Effort) -> None:
        """Note in `lacking` each count, of sizes or statistics, that is below the least needed."""
        seen = {**self.sizes, **self.statistic}
        for name, count in least.items():
            if seen.get(name, 0) < effort.need(count):
                words = name.replace("_", " ")
                self.lacking.append(f"{words}: {seen.get(name, 0):,g}, at least {effort.need(count):,} are needed")


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
    on_host: bool = False  # CPU arithmetic alone, whatever device the models are on
    least: Mapping[str, int] = field(default_factory=dict)
    remedy: str = MORE

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a check by the module and the qualified name of its function, which now name the check."""
        return named, (self.run.__module__, self.run.__qualname__)


def named(module: str, name: str) -> Any:
    """The object that a qualified name stands for in a module; `Class.member` is returned without binding."""
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
    """Decorator that makes a Check of a function, whose docstring says what a pass proves."""

    def made(run: Callable[[Subject, Effort], Found]) -> Check:
        proves = " ".join((run.__doc__ or "").split())
        return Check(id, name, proves, threshold, full, run, on_host, least, remedy)

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


class _Heard(logging.Handler):
    """Log handler that keeps each logged error as one line."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self.errors.append(record.getMessage() + (f" ({type(cause).__name__}: {cause})" if cause is not None else ""))


@contextmanager
def _errors() -> Iterator[list[str]]:
    """Collect what the engine logs as errors meanwhile: a failing draft costs speed and is reported nowhere else."""
    log, heard = logging.getLogger("sameseed"), _Heard()
    log.addHandler(heard)
    try:
        yield heard.errors
    finally:
        log.removeHandler(heard)


def run_check(check: Check, subject: Subject, effort: Effort) -> Result:
    """Run one check: an exception in it counts as a failure, too little evidence as "not shown".

    The sizes also get the counts of the configured draft (guesses, accepted, rejections), without those of scripted
    trees.
    """
    start, before = time.perf_counter(), subject.metrics.copy()
    try:
        with _errors() as hidden:
            found = check.run(subject, effort)
        for error in hidden[:1]:
            found.add(HIDDEN, "none", error)
    except Exception as error:  # any exception: a check that breaks down proves nothing
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
