"""The held-out test: mistakes drawn by a seeded generator, and which of them the certificate's checks catch."""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from proof.drawn import DrawnMutant
from proof.mutant import REFERENCE, Mutant
from proof.mutants import toy_subject
from sameseed.laws import trial
from sameseed.laws.check import FAILED, HIDDEN, PASSED, Check, Effort, Result, run_check
from sameseed.tokenizer import Tokenizer

# Outcomes of a mistake. Only "caught" means that a check of the laws rejected it.
CAUGHT, BROKE_DOWN, NO_END, COUNTS, MISSED = "caught", "broke down", "no end", "other counts alone", "not caught"
# Ways to run: as users do, and with the ops and the sampler that are written in Python.
WAYS: tuple[tuple[dict[str, str], bool], ...] = (({}, True), (REFERENCE, False))
SIZES = (0.2, 1.0)  # shares of the least sizes: most mistakes show at a fifth; the rest are tried at full
PATIENCE, SLACK = 5.0, 10.0  # a check hangs after PATIENCE times its usual seconds, plus SLACK seconds
AGAIN = 2.0  # seconds after which the interrupt is repeated, for code that waits in its cleanup
MOST_BREAKS = 4  # checks that break down before no further check is run
Key = tuple[int, str, float]  # way, check, size
_CRASH = "Internal Server Error"  # what a server answers after an exception
_RIGHT = ("nothing is wrong", trial.outcome, "c = completion", "c = completion")  # a mutant that changes nothing


class NoEndError(KeyboardInterrupt):
    """Raised in a check that hangs.

    Not an Exception, so that tested code does not catch it and event loops let it through.
    """


@dataclass(frozen=True)
class Verdict:
    """The outcome of a drawn mistake: `by` names the check that decided it, `said` holds what the check reported."""

    name: str
    area: str
    kind: str
    outcome: str
    by: str | None
    said: str
    seconds: float


@dataclass
class MutantBench:
    """The checks run on toys, and the lines that each check runs in correct code.

    C2 and A1 judge what other checks left behind.
    """

    tokenizer: Tokenizer
    checks: Seq[Check]
    files: set[str]  # source files whose executed lines are recorded
    base: Mapping[str, Any] = field(default_factory=dict)  # settings of the toys; those of a way override them
    lines: dict[tuple[int, str], set[tuple[str, int]]] = field(default_factory=dict)
    results: dict[Key, Result] = field(default_factory=dict)
    seconds: dict[Key, float] = field(default_factory=dict)  # of each result, with the checks before it

    def who(self, drawn: DrawnMutant) -> list[tuple[int, str]]:
        """(way, check) pairs that run the mutated lines and pass on correct code, quickest first.

        All pairs belong to the first way that has any.
        """
        places = {(drawn.file, line) for line in drawn.lines}
        for way in range(len(WAYS)):
            for check in self.checks:  # on the first call, each check runs once, traced
                if (way, check.id) not in self.lines:
                    with _traced(self.files) as seen:
                        self.right((way, check.id, SIZES[0]))
                    self.lines[way, check.id] = seen
            reached = [(way, check.id) for check in self.checks if places & self.lines[way, check.id]]
            able = [key for key in reached if self.right((*key, SIZES[0])).status == PASSED]
            if able:
                return sorted(able, key=lambda key: self.seconds[(*key, SIZES[0])])
        return []

    def right(self, key: Key) -> Result:
        """The result of a check on correct code; each is measured once."""
        if key not in self.results:
            start = time.perf_counter()
            self.results[key] = self.look(Mutant(*_RIGHT, native=WAYS[key[0]][1]), key)
            self.seconds[key] = time.perf_counter() - start
        return self.results[key]

    def look(self, mutant: Mutant, key: Key, seconds: float | None = None) -> Result:
        """Run one check on a fresh toy while a mutant is active. Raises NoEndError after `seconds`."""
        way, name, size = key
        every, effort = {c.id: c for c in self.checks}, Effort(1e-9, size)
        with mutant.alive(), _at_most(seconds):
            subject = toy_subject(self.tokenizer, **{**self.base, **WAYS[way][0]})
            if name in ("A1", "C2"):
                for before in ("L3", "P1", "W1")[: 1 if name == "A1" else 3]:
                    run_check(every[before], subject, Effort(1e-9, max(1.0, 10 * size) if name == "A1" else size))
            return run_check(every[name], subject, effort)


def judge(drawn: DrawnMutant, bench: MutantBench) -> Verdict:
    """Run the checks that reach the mutated lines until one says that a law is broken.

    Mistakes that only break down, hang, or change what is counted (draft tokens, preemptions) get outcomes of their
    own.
    """
    start, weaker = time.perf_counter(), Verdict(drawn.mutant.name, drawn.area, drawn.kind, MISSED, None, "", 0.0)
    keys = [(way, name, size) for size in SIZES for way, name in bench.who(drawn)]
    breaks = 0
    for key in keys:
        outcome, said = _outcome(drawn, bench, key)
        breaks += outcome == BROKE_DOWN
        if _RANK[outcome] < _RANK[weaker.outcome]:
            weaker = Verdict(drawn.mutant.name, drawn.area, drawn.kind, outcome, key[1], said, 0.0)
        if outcome in (CAUGHT, NO_END) or breaks == MOST_BREAKS:
            break
    return Verdict(**asdict(weaker) | {"seconds": round(time.perf_counter() - start, 2)})


def judge_apart(drawn: DrawnMutant, bench: MutantBench) -> Verdict:
    """`judge` in a fresh process, so that what a mistake leaves behind (threads, cached values) ends with the process.

    The bench keeps the results on correct code that the process measured.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sameseed.laws.mutants"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_judge_into, args=(there, drawn, bench))
    start = time.perf_counter()
    process.start()
    there.close()
    verdict: Verdict
    try:
        verdict, bench.results, bench.seconds = here.recv()
    except EOFError:
        verdict = Verdict(drawn.mutant.name, drawn.area, drawn.kind, BROKE_DOWN, None, "its process died", 0.0)
    finally:
        process.kill()
        process.join()
    return replace(verdict, seconds=round(time.perf_counter() - start, 2))


def _judge_into(there: Connection, drawn: DrawnMutant, bench: MutantBench) -> None:
    there.send((judge(drawn, bench), bench.results, bench.seconds))


_RANK = {name: i for i, name in enumerate((CAUGHT, NO_END, BROKE_DOWN, COUNTS, MISSED))}


def _outcome(drawn: DrawnMutant, bench: MutantBench, key: Key) -> tuple[str, str]:
    right = bench.right(key)
    if right.status != PASSED:  # at this size the check says nothing
        return MISSED, ""
    limit = SLACK + PATIENCE * bench.seconds[key]
    mutant = Mutant(**{**vars(drawn.mutant), "native": WAYS[key[0]][1]})
    try:
        result = bench.look(mutant, key, limit)
    except NoEndError:
        return NO_END, f"no end after {limit:.0f} s"
    except Exception as error:  # the toy could not even be built
        return BROKE_DOWN, f"{type(error).__name__}: {error}"[:300]
    if result.status == FAILED:
        first = result.found.findings[0]
        said = f"{first.where}: {first.found}"[:300]
        broke = result.found.unfinished or _CRASH in said or all(f.where == HIDDEN for f in result.found.findings)
        return (BROKE_DOWN if broke else CAUGHT), said
    if result.found.lacking:
        return COUNTS, result.found.lacking[0]
    changed = [n for n, v in right.found.sizes.items() if result.found.sizes.get(n) != v]
    return (COUNTS, ", ".join(changed)) if changed and key[1] != "L5" else (MISSED, "")


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """Where the true share of hits lies with 95 % confidence (Wilson's score interval, 1927)."""
    if count == 0:
        return 0.0, 1.0
    z, share = 1.959964, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def score(verdicts: Seq[Verdict], unreached: Seq[str], seed: int) -> dict[str, Any]:
    """Outcome counts as plain data, with a 95 % interval for the share caught.

    The share is that of mistakes that neither break down nor hang.
    """
    counts = {name: sum(v.outcome == name for v in verdicts) for name in _RANK}
    live = counts[CAUGHT] + counts[MISSED] + counts[COUNTS]
    low, high = share_interval(counts[CAUGHT], live)
    return {
        "seed": seed,
        "drawn": len(verdicts) + len(unreached),
        "unreached": list(unreached),
        **{name.replace(" ", "_"): n for name, n in counts.items()},
        "interval": [round(low, 4), round(high, 4)],
        "trials": [asdict(v) for v in verdicts],
    }


@contextmanager
def _at_most(seconds: float | None) -> Iterator[None]:
    """Raise NoEndError in the main thread after `seconds`; no limit in other threads, or for None."""
    if seconds is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise NoEndError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _traced(files: set[str]) -> Iterator[set[tuple[str, int]]]:
    """Collect the lines of these files that run meanwhile, as (file, line); a mutant's code belongs to no file."""
    seen: set[tuple[str, int]] = set()

    def line(frame: FrameType, event: str, arg: object) -> Any:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        return line(frame, event, arg) if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(enter)
    threading.settrace(enter)
    try:
        yield seen
    finally:
        sys.settrace(before)
        threading.settrace(before)
