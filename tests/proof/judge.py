"""What becomes of a drawn mistake: a check rejects it, it only breaks down, it does not end, or it is not noticed."""

import multiprocessing
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from proof.mutant import REFERENCE, Mutant
from proof.mutants import toy_subject
from sameseed.laws import trial
from sameseed.laws.check import FAILED, HIDDEN, PASSED, Check, Effort, run_check
from sameseed.tokenizer import Tokenizer

# Outcomes of a mistake. Only "caught" means that a check of the laws rejected it.
CAUGHT, BROKE_DOWN, NO_END, MISSED, UNREACHED = "caught", "broke down", "no end", "not caught", "unreached"
# How the toys run: as users run models, and with the ops and the sampler that are written in Python.
WAYS = (({}, True), (REFERENCE, False))
RIGHT = ("nothing is wrong", trial.outcome, "c = completion", "c = completion")  # a mutant that changes nothing
CRASH = "Internal Server Error"  # what a server answers after an exception
Key = tuple[int, str, float]  # way, check, size


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
class Bench:
    """Checks on toy models, what they find in right code, and how long that takes. C2 and A1 judge what others left."""

    tokenizer: Tokenizer
    checks: Seq[Check]
    slack: float = 10.0  # a check hangs after five times its usual seconds, and these
    sizes: Seq[float] = (0.2, 1.0)  # of the least: most mistakes show at a fifth; the rest are tried at full
    right: dict[Key, tuple[str, float]] = field(default_factory=dict)  # status and seconds

    def usual(self, key):
        """Status and seconds of a check on right code; each is measured once."""
        if key not in self.right:
            start = time.perf_counter()
            status = self.look(Mutant(*RIGHT, native=WAYS[key[0]][1]), key).status
            self.right[key] = status, time.perf_counter() - start
        return self.right[key]

    def look(self, mutant, key):
        """Run one check on a fresh toy while a mutant is active."""
        (way, name, size), every = key, {c.id: c for c in self.checks}
        with mutant.alive():
            subject = toy_subject(self.tokenizer, **WAYS[way][0])
            before = {"A1": ("L3",), "C2": ("L3", "P1", "W1")}.get(name, ())
            for other in before:
                run_check(every[other], subject, Effort(1e-9, max(1.0, 10 * size) if name == "A1" else size))
            return run_check(every[name], subject, Effort(1e-9, size))


def judge(drawn, bench):
    """Run the checks, in a process of their own, until one says that a law is broken.

    What a mistake leaves behind (threads, cached values) ends with the process.
    """
    start, found = time.perf_counter(), (UNREACHED, "", "")
    for way, size in ((way, size) for size in bench.sizes for way in range(len(WAYS))):
        passing = [c.id for c in bench.checks if bench.usual((way, c.id, size))[0] == PASSED]
        for name in sorted(passing, key=lambda name: bench.usual((way, name, size))[1]):
            outcome, said = _apart(drawn.mutant, bench, (way, name, size))
            if RANK[outcome] < RANK[found[0]]:
                found = outcome, name, said
            if outcome in (CAUGHT, NO_END):
                break
        else:
            continue
        break
    outcome, by, said = found
    seconds = round(time.perf_counter() - start, 2)
    by_whom = by if outcome not in (MISSED, UNREACHED) else None
    return Verdict(drawn.mutant.name, drawn.area, drawn.kind, outcome, by_whom, said, seconds)


RANK = {name: i for i, name in enumerate((CAUGHT, NO_END, BROKE_DOWN, MISSED, UNREACHED))}


def _apart(mutant, bench, key):
    """Outcome of one check in a forked process, and what the check said."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_look, args=(there, mutant, bench, key))
    process.start()
    there.close()
    limit = bench.slack + 5.0 * bench.usual(key)[1]
    try:
        found = here.recv() if here.poll(limit) else (NO_END, f"no end after {limit:.0f} s")
    except EOFError:
        found = BROKE_DOWN, "its process died"
    finally:
        process.kill()
        process.join()
    return found


def _look(there, mutant, bench, key):
    reached = []

    def called(frame, event, arg):
        if frame.f_code.co_filename == "<mutant>":
            reached.append(True)
            sys.setprofile(None)

    sys.setprofile(called)
    try:
        result = bench.look(Mutant(**{**vars(mutant), "native": WAYS[key[0]][1]}), key)
    except Exception as error:  # the toy could not even be built
        there.send((BROKE_DOWN, f"{type(error).__name__}: {error}"[:300]))
        return
    if result.status != FAILED:
        there.send((MISSED if reached else UNREACHED, ""))
        return
    first = result.found.findings[0]
    said = f"{first.where}: {first.found}"[:300]
    broke = result.found.unfinished or CRASH in said or all(f.where == HIDDEN for f in result.found.findings)
    there.send((BROKE_DOWN if broke else CAUGHT, said))


def score(verdicts, seed):
    """The outcomes as plain data, those that no check reached apart."""
    counts = {name.replace(" ", "_"): sum(v.outcome == name for v in verdicts) for name in RANK if name != UNREACHED}
    apart = [v.name for v in verdicts if v.outcome == UNREACHED]
    trials = [vars(v) for v in verdicts if v.outcome != UNREACHED]
    return {"seed": seed, "drawn": len(verdicts), "unreached": apart, **counts, "trials": trials}
