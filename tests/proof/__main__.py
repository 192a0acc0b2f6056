"""Mutation test of the certificate's checks, with randomly generated mutants or with those written in the source.

    PYTHONPATH=tests .venv/bin/python -m proof --seed 7 --count 60 --state drawn.jsonl    # the same command resumes
    PYTHONPATH=tests .venv/bin/python -m proof --written --state written.jsonl

Each verdict is one line of `--state`; mutants with a verdict are not tried again. At the end, one record is appended to
`--out`. `--areas` draws mutants only from the named areas.
"""

import argparse
import json
from pathlib import Path

from proof import mutants
from proof.drawn import AREAS, draw
from proof.judge import UNREACHED, Bench, Verdict, judge, score
from proof.mistakes_server import SERVER_MISTAKES
from sameseed.measure.workload import ASSETS
from sameseed.report import record
from sameseed.tokenizer import Tokenizer

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "mutants.jsonl"
SCHEMA = "sameseed.mutants/1"


def written(tokenizer, state):
    """Try the mutants written in the source; returns their score."""
    baseline = mutants.Baseline(tokenizer)
    for mutant in (*mutants.MUTANTS, *SERVER_MISTAKES):
        if mutant.name not in state.done:
            state.add(vars(mutants.try_mutant(mutant, baseline)))
    trials = list(state.done.values())
    return {"caught": sum(t["caught_by"] is not None for t in trials), "total": len(trials), "trials": trials}


def drawn(tokenizer, state, seed, count, areas):
    """Try random mutants until `count` of them lie in functions that a check runs; returns their score."""
    bench = Bench(tokenizer, mutants.CHECKS)
    for one in draw(seed, {name: modules for name, modules in AREAS.items() if not areas or name in areas}):
        if sum(found["outcome"] != UNREACHED for found in state.done.values()) >= count:
            break
        if one.mutant.name not in state.done:
            state.add(vars(judge(one, bench)))
    return score([Verdict(**found) for found in state.done.values()], seed)


class State:
    """Verdicts by mutant name, kept in a file."""

    def __init__(self, path):
        self.path = path
        self.done = {found["name"]: found for found in self._lines()}

    def _lines(self):
        if self.path.exists():
            yield from map(json.loads, self.path.read_text(encoding="utf-8").splitlines())

    def add(self, verdict):
        """Save a verdict and print it."""
        self.done[verdict["name"]] = verdict
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(verdict) + "\n")
        print(len(self.done), verdict.get("outcome", verdict.get("caught_by")), verdict["name"], flush=True)


def main():
    """Try the mutants, then append the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="mutants in functions that some check runs")
    parser.add_argument("--areas", nargs="*", default=[], help="draw from these alone")
    parser.add_argument("--written", action="store_true", help="those of the source in place of drawn ones")
    parser.add_argument("--state", type=Path, required=True, help="what was found so far")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    tokenizer, state = Tokenizer.from_folder(ASSETS / "target"), State(args.state)
    if args.written:
        found = {"written": written(tokenizer, state)}
    else:
        found = {"drawn": drawn(tokenizer, state, args.seed, args.count, args.areas)}
    origin = {"schema": SCHEMA, "time": record.now(), "commit": record.commit(), "machine": record.machine()}
    with args.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**origin, **found}) + "\n")


if __name__ == "__main__":
    main()
