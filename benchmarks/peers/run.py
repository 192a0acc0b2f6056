"""Measures sameseed and other engines ("peers") interleaved on one machine; writes one record per run.

    python benchmarks/peers/run.py --shape llama-3.2-1b --home ENVIRONMENTS --work FOLDER [--arms 'llama.cpp*']

`make bench-peers` runs this. Each engine runs in its own process and environment (`make peers`), and is frozen while
another engine is measured. In each round, each engine runs each number of rows once, so that drift of the machine
affects all alike. The tables' ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from arms import ALL, TEXTS, Arm, choose
from checkpoints import PARALLEL_FOLDER, path_of, wanted
from client import Client
from measure import Group, Plan, Result, TextGroup, as_record, texts_record
from table import render

from sameseed.engine.memory import available_memory
from sameseed.errors import SameseedError
from sameseed.measure.workload import DEFAULT_PROMPTS, prompts_name, read_prompts
from sameseed.models.loader import load_tokenizer
from sameseed.report import record

SCHEMA = "sameseed.peers/1"
OUT = Path(__file__).resolve().parents[1] / "results" / "peers.jsonl"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(ALL), default="llama-3.2-1b")
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
    parser.add_argument(
        "--slow-rounds", type=int, default=Plan.slow_rounds, help="repetitions of prefill and batch, or of texts"
    )
    parser.add_argument("--model", type=Path, help="with --shape own: the GGUF file of the target")
    parser.add_argument("--draft", type=Path, help="with --shape own: the GGUF file of the draft model, if any")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, help="of texts: a file or a published set")
    parser.add_argument("--num-prompts", type=int, default=12, help="of texts: so many of them")
    parser.add_argument("--max-tokens", type=int, default=Plan.text_tokens, help="of texts: at most so many tokens")
    return parser.parse_args(argv)


def gib_of(arm: Arm, options: argparse.Namespace) -> float:
    """The memory that an arm needs; of one's own files by their size, in bf16 as if they had 4.5 bits a weight."""
    if options.shape != "own" or options.model is None:
        return arm.gib
    files = [options.model, *([options.draft] if arm.draft and options.draft else [])]
    stored = arm.engine == "llama_cpp" or arm.options.get("format") == "auto"
    return sum(file.stat().st_size for file in files if file.is_file()) / 2**30 * (1.0 if stored else 16 / 4.5)


def check(groups: dict[str, list[Arm]], options: argparse.Namespace) -> list[str]:
    """Problems that prevent the measurement, each with its remedy. Checked before anything is loaded."""
    problems = []
    if len(os.sched_getaffinity(0)) < options.threads:
        problems.append(
            f"{options.threads} threads asked for, {len(os.sched_getaffinity(0))} cores here: lower --threads"
        )
    if options.formats and options.shape in TEXTS:
        problems.append(f"--formats is for passes; {options.shape} has texts, by the arms of benchmarks/peers/arms.py")
    if not groups:
        problems.append("no arm matches; see benchmarks/peers/arms.py for their names")
    for group, arms in groups.items():
        need, free = sum(gib_of(arm, options) for arm in arms), available_memory() / 2**30
        if need > free:
            problems.append(
                f"group {group!r} takes about {need:.0f} GiB and {free:.0f} are free: choose fewer with --arms"
            )
    arms = [arm for group in groups.values() for arm in group]
    for engine in sorted({arm.engine for arm in arms if not arm.ours}):
        if not (options.home / engine / ".installed").exists():
            problems.append(f"no environment of {engine} in {options.home}: `make peers PEERS_HOME={options.home}`")
    if options.shape == "own" and (options.model is None or not options.model.is_file()):
        problems.append("--shape own needs the GGUF file of the target: --model FILE")
    for shape, kinds in {} if options.shape == "own" else wanted(options.shape, arms).items():
        missing = [kind for kind in kinds if not path_of(options.work, shape, kind).exists()]
        if missing:
            problems.append(
                f"no {' '.join(missing)} in {options.work}: python benchmarks/peers/checkpoints.py --shape {shape} "
                f"--home {options.home} --work {options.work} {' '.join(missing)}"
            )
    return problems


def without_parallel(groups: dict[str, list[Arm]], options: argparse.Namespace) -> dict[str, list[Arm]]:
    """The groups without arms whose parallel draft was not made, which are named."""

    def there(arm: Arm) -> bool:
        if options.shape == "own":
            return arm.draft is None or options.draft is not None
        if arm.draft is None or arm.draft[0] != "parallel":
            return True
        made = path_of(options.work, f"{options.shape}-parallel", arm.draft[1]).exists()
        if not made:
            print(f"left out: {arm.name}; see {PARALLEL_FOLDER} in benchmarks/peers/README.md", flush=True)
        return made

    return {name: [arm for arm in arms if there(arm)] for name, arms in groups.items()}


def start(arm: Arm, home: Path, log: Path) -> Client:
    """Start a worker of the arm's engine; sameseed runs with this same Python interpreter."""
    environment = dict(os.environ)
    if arm.ours:
        return Client(Path(sys.executable), arm.engine, log, environment)
    environment.pop("PYTHONPATH", None)  # may point to sameseed's packages, which must not leak into other environments
    return Client(home.resolve() / arm.engine / "bin" / "python", arm.engine, log, environment)


def run_group(
    name: str, arms: list[Arm], plan: Plan, options: argparse.Namespace, prompts: list[list[int]]
) -> dict[str, Any]:
    """Measure one group of arms; returns its part of the record."""
    logs = options.work / "logs"
    print(f"\n{name}: {', '.join(arm.name for arm in arms)}", flush=True)
    begin = lambda arm: start(arm, options.home, logs / f"{arm.name.replace(' ', '-')}.log")  # noqa: E731
    say = lambda text: print("  " + text, flush=True)  # noqa: E731

    def place(shape: str, kind: str) -> str:
        if kind == "own":
            return str((options.model if shape == "own" else options.draft).resolve())
        return str(path_of(options.work, shape, kind).resolve())

    def load(arm: Arm) -> dict[str, Any]:
        asked = {"model": place(options.shape, arm.checkpoint), "threads": plan.threads, "options": dict(arm.options)}
        if not prompts:
            return {**asked, "max_len": plan.max_len, "batch": plan.batch}
        draft = place(f"{options.shape}-{arm.draft[0]}", arm.draft[1]) if arm.draft else None
        return {**asked, "draft": draft, "max_len": plan.text_len(prompts)}

    group = TextGroup(arms, plan, begin, say, prompts) if prompts else Group(arms, plan, begin, say)
    return make_group(name, group.run(load), plan)


def encoded(options: argparse.Namespace) -> list[list[int]]:
    """The prompts as token ids, for a shape whose arms generate texts; empty for other shapes. Raises ConfigError."""
    if options.shape not in TEXTS:
        return []
    own = options.shape == "own"
    tokenizer = load_tokenizer(options.model if own else path_of(options.work, options.shape, "hf-bf16"))
    return [list(p.encode(tokenizer)) for p in read_prompts(options.prompts, options.num_prompts)]


def make_group(name: str, results: list[Result], plan: Plan) -> dict[str, Any]:
    """One group as plain data for a record. Logits are compared with those of the first arm that has logits."""
    reference = next((r.logits for r in results if r.logits is not None), None)
    arms = [{**as_record(r, plan, reference), "texts": texts_record(r, results)} for r in results]
    return {"name": name, "arms": arms}


def main(argv: list[str] | None = None) -> int:
    """Measure, append the record, print its tables. Returns 2 if a problem prevents the measurement."""
    options = arguments(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs `finally` blocks, ending workers
    same = {name: getattr(options, name) for name in ("threads", "context", "rounds", "slow_rounds")}
    plan = Plan(rows=tuple(sorted(set(options.rows))), text_tokens=options.max_tokens, **same)
    groups = choose(ALL[options.shape], options.arms, options.formats)
    groups = {name: arms for name, arms in groups.items() if not options.groups or name in options.groups}
    groups = without_parallel(groups, options)
    problems = check(groups, options)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    try:
        prompts = encoded(options)
    except SameseedError as error:
        print(error, file=sys.stderr)
        return 2
    record.prepare(options.out)
    line: dict[str, Any] = {
        "schema": SCHEMA,
        "run": record.now(),
        "commit": record.commit(),
        "machine": record.machine(),
        "shape": options.shape,
        "plan": {**plan.__dict__, "rows": [] if prompts else list(plan.rows)},
        "prompts": {"from": prompts_name(options.prompts), "count": len(prompts)} if prompts else None,
        "groups": [],
    }
    for name, arms in groups.items():
        line["groups"].append(run_group(name, arms, plan, options, prompts))
    line["time"] = record.now()
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print("\n" + render(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
