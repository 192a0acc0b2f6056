"""sameseed and its peers, measured in turns on one machine; a record a run. `make bench-peers` runs this.

    python benchmarks/peers/run.py --shape llama-3.2-1b --home ENVIRONMENTS --work FOLDER [--arms 'llama.cpp*']

Every engine runs in a process and an environment of its own (`make peers`), frozen while another is measured; in each
round each engine runs each number of rows once, so that a machine that slows down does so for all alike. The tables'
ratios are of one round each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from arms import PLANS, Arm, choose
from checkpoints import KINDS, path_of
from client import Client
from measure import Group, Plan, Result, as_record
from table import render

from sameseed.engine.memory import available_memory
from sameseed.study import record

SCHEMA = "sameseed.peers/1"
OUT = Path(__file__).resolve().parents[1] / "results" / "peers.jsonl"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(PLANS), default="llama-3.2-1b")
    parser.add_argument("--home", type=Path, required=True, help="folder of the environments (make peers)")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoints (checkpoints.py)")
    parser.add_argument("--out", type=Path, default=OUT, help="record file that a line is appended to")
    parser.add_argument(
        "--arms", nargs="+", default=[], metavar="PATTERN", help="only peers with such names, e.g. 'vllm*'"
    )
    parser.add_argument("--formats", nargs="+", default=[], metavar="FORMAT", help="sameseed's formats, in every group")
    parser.add_argument("--groups", nargs="+", default=[], metavar="NAME", help="only these groups of the shape")
    parser.add_argument("--threads", type=int, default=Plan.threads)
    parser.add_argument("--rows", type=int, nargs="+", default=Plan.rows)
    parser.add_argument("--context", type=int, default=Plan.context)
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="repetitions of each number of rows")
    parser.add_argument("--slow-rounds", type=int, default=Plan.slow_rounds, help="repetitions of prefill and batch")
    return parser.parse_args(argv)


def check(groups: dict[str, list[Arm]], options: argparse.Namespace) -> list[str]:
    """What is in the way, each with its remedy; before anything is loaded."""
    problems = []
    if len(os.sched_getaffinity(0)) < options.threads:
        problems.append(
            f"{options.threads} threads asked for, {len(os.sched_getaffinity(0))} cores here: lower --threads"
        )
    if not groups:
        problems.append("no arm matches; see benchmarks/peers/arms.py for their names")
    for group, arms in groups.items():
        need, free = sum(arm.gib for arm in arms), available_memory() / 2**30
        if need > free:
            problems.append(
                f"group {group!r} takes about {need:.0f} GiB and {free:.0f} are free: choose fewer with --arms"
            )
    arms = [arm for group in groups.values() for arm in group]
    for engine in sorted({arm.engine for arm in arms if not arm.ours}):
        if not (options.home / engine / ".installed").exists():
            problems.append(f"no environment of {engine} in {options.home}: `make peers PEERS_HOME={options.home}`")
    missing = {arm.checkpoint for arm in arms if not path_of(options.work, options.shape, arm.checkpoint).exists()}
    if missing:
        kinds = " ".join(kind for kind in KINDS if kind in missing)
        problems.append(
            f"no {kinds} in {options.work}: python benchmarks/peers/checkpoints.py --shape {options.shape} "
            f"--home {options.home} --work {options.work} {kinds}"
        )
    return problems


def start(arm: Arm, home: Path, log: Path) -> Client:
    """A worker of the arm's engine; sameseed's runs with this very Python."""
    environment = dict(os.environ)
    if arm.ours:
        return Client(Path(sys.executable), arm.engine, log, environment)
    environment.pop("PYTHONPATH", None)  # what helps this Python to find sameseed is nothing for theirs
    return Client(home.resolve() / arm.engine / "bin" / "python", arm.engine, log, environment)


def run_group(name: str, arms: list[Arm], plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one group; its part of the record."""
    logs = options.work / "logs"
    print(f"\n{name}: {', '.join(arm.name for arm in arms)}", flush=True)
    group = Group(
        arms,
        plan,
        lambda arm: start(arm, options.home, logs / f"{arm.name.replace(' ', '-')}.log"),
        lambda text: print("  " + text, flush=True),
    )

    def load(arm: Arm) -> dict[str, Any]:
        model = str(path_of(options.work, options.shape, arm.checkpoint).resolve())
        limits = {"threads": plan.threads, "max_len": plan.max_len, "batch": plan.batch}
        return {"model": model, **limits, "options": dict(arm.options)}

    return make_group(name, group.run(load), plan)


def make_group(name: str, results: list[Result], plan: Plan) -> dict[str, Any]:
    """One group as a record holds it; logits are compared with those of the first arm that has some."""
    reference = next((r.logits for r in results if r.logits is not None), None)
    return {"name": name, "arms": [as_record(result, plan, reference) for result in results]}


def main(argv: list[str] | None = None) -> int:
    """Measure, append the record, print its tables. 2 if something is in the way."""
    options = arguments(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that workers are ended
    same = {name: getattr(options, name) for name in ("threads", "context", "rounds", "slow_rounds")}
    plan = Plan(rows=tuple(sorted(set(options.rows))), **same)
    groups = choose(PLANS[options.shape], options.arms, options.formats)
    groups = {name: arms for name, arms in groups.items() if not options.groups or name in options.groups}
    problems = check(groups, options)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    record.prepare(options.out)
    line: dict[str, Any] = {
        "schema": SCHEMA,
        "run": record.now(),
        "commit": record.commit(),
        "machine": record.machine(),
        "shape": options.shape,
        "plan": {**plan.__dict__, "rows": list(plan.rows)},
        "groups": [],
    }
    for name, arms in groups.items():
        line["groups"].append(run_group(name, arms, plan, options))
    line["time"] = record.now()
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print("\n" + render(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
