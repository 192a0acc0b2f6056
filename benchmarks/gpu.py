"""`make bench-gpu`: all measurements on one GPU, in under 9 minutes, without a network.

    python benchmarks/gpu.py [--device cuda] [--formats bf16,w4a16] [--minutes 8.5] [--out RECORDS.jsonl]
    python benchmarks/gpu.py --dry-run        # everything at toy sizes on the CPU, in a few minutes

Writes one record per measurement as soon as it is done, and a last record that names what was left out, and why. Each
part runs in its own process, so a part that fails, hangs or breaks the device does not affect the others. At the end it
prints a table of aims and results. It needs only the checkout: no installed package, no native module.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gpu_summary
import torch
from gpu_sizes import DRY, KINDS, Part, Sizes, parts

from sameseed import devices, ops
from sameseed.errors import ConfigError, SameseedError
from sameseed.report import record
from sameseed.scheme import QuantScheme

SCHEMA = "sameseed.gpu/1"
GRACE = 4.0  # seconds past its time before a part is killed: a process that hangs in a kernel gets no alarm signal
COMPILE = 60.0  # seconds in which all kernels are compiled, by as many processes as there are parts
PARTS = {
    "limits": ("gpu_passes", "measure_limits"),
    "costs": ("gpu_passes", "measure_costs"),
    "speculation": ("gpu_twins", "measure_speculation"),
    "large": ("gpu_twins", "measure_large"),
    "transformers": ("gpu_passes", "measure_transformers"),
}
Take = Callable[[dict[str, Any]], None]


class TimeUp(BaseException):  # a BaseException, so that no `except Exception` swallows it
    """A part's time is over: its records so far stand, the rest is left out."""


def work() -> None:
    """The worker process: run the job from stdin (one JSON line) and write JSON lines; ends by itself."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end when the parent ends, so that the device is released
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to the log

    def tell(found: Mapping[str, Any]) -> None:
        print(json.dumps(found), file=out, flush=True)

    def ring(*_: object) -> None:
        raise TimeUp

    for module, _ in PARTS.values():  # imported before the job comes; who needs a broken one reports it
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    if line := sys.stdin.readline().strip():
        job = json.loads(line)
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, max(0.1, job["seconds"]))
        try:
            backend = ops.resolve(job["backend"], job["device"])
            module, name = PARTS[job["kind"]]
            function = getattr(importlib.import_module(module), name)
            function(Sizes.from_dict(job["sizes"]), backend, job["device"], tell, **job["arguments"])
            if backend.name == "triton":  # ops whose kernel did not compile ran on the reference
                guard = importlib.import_module("sameseed.ops.triton.guard")
                tell({"part": "broken", "kind": job["kind"], "ops": sorted(guard.broken)})
        except TimeUp:
            tell({"omit": "the rest", "why": f"its {job['seconds']:.0f} s were over; what is recorded was done before"})
        except Exception as error:
            traceback.print_exc()
            tell({"omit": "the rest", "why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]})
        signal.setitimer(signal.ITIMER_REAL, 0)
        tell({"done": True})
    os._exit(0)  # an orderly shutdown of the device context takes seconds, and may hang after a fault


class Worker:
    """A worker process, which waits for its job; its stderr goes to `log`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip

    def run(self, job: Mapping[str, Any], seconds: float, take: Take) -> str | None:
        """Run a job for at most `seconds`, and call `take` with each line. Returns None, or why it failed."""
        alarm = threading.Timer(seconds + GRACE, self.end)
        alarm.start()
        done = False
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({**job, "seconds": seconds}).encode() + b"\n")
            self.process.stdin.close()
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # not a record: a library's output
                found = json.loads(line)
                done = done or "done" in found
                if "done" not in found:
                    take(found)
        alarm.cancel()
        self.end()
        last = self.log.read_bytes()[-2000:].decode(errors="replace").strip().splitlines()
        return None if done else f"its process ended early: {last[-1][:300] if last else 'it said nothing'}"

    def end(self) -> None:
        """Kill the process and all that it started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Run:
    """All parts, one after the other; the next part's worker starts ahead. Its records go to a file and to `lines`."""

    def __init__(self, args: argparse.Namespace, sizes: Sizes, shared: Mapping[str, Any]) -> None:
        self.args, self.sizes, self.log = args, sizes, args.out.with_suffix(".log")
        self.shared = {"schema": SCHEMA, "run": record.now(), **shared}
        self.lines: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        self.limits: dict[str, Any] | None = None
        self.until = time.monotonic() + 60 * sizes.minutes
        self.workers: list[Worker] = []

    def write(self, found: Mapping[str, Any]) -> None:
        """Append one record, and print it in one line."""
        line = {**self.shared, "time": record.now(), **found}
        self.lines.append(line)
        with self.args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if words := gpu_summary.words(found):
            print(f"  {words}", flush=True)

    def omit(self, what: str, why: str) -> None:
        """Note and print that something was not measured."""
        self.left_out.append({"what": what, "why": why})
        print(f"  left out: {what}: {why}", flush=True)

    def worker(self) -> Worker:
        """A new worker."""
        self.workers.append(Worker(self.log))
        return self.workers[-1]

    def job(self, part: Part, **more: Any) -> dict[str, Any]:
        """What a worker must know of a part."""
        limits = {"limits": self.limits} if part.kind == "costs" else {}
        shared = {"sizes": asdict(self.sizes), "device": self.args.device, "backend": self.args.backend}
        return {**shared, "kind": part.kind, "arguments": {**part.arguments, **limits, **more}}

    def all(self) -> None:
        """Compile the kernels in many processes at once, then run the parts in order of importance."""
        todo = parts(self.sizes, self.args.parts)
        warm = [p for p in todo if p.kind in ("costs", "speculation", "large")]
        if self.args.device != "cpu" and warm:
            with ThreadPoolExecutor(len(warm)) as pool:
                jobs = [(self.worker(), self.job(p, warm=True)) for p in warm]
                list(pool.map(lambda pair: pair[0].run(pair[1], COMPILE, lambda found: None), jobs))
        spare = self.worker()
        for i, part in enumerate(todo):
            worker, spare = spare, self.worker() if i + 1 < len(todo) else spare
            later, left = sum(p.seconds for p in todo[i + 1 :]), self.until - time.monotonic()
            seconds = min(left, part.seconds + min(part.seconds, max(0.0, left - part.seconds - later)))
            print(f"{part.name} (at most {seconds:.0f} s, {left:.0f} s left)", flush=True)
            why = (
                worker.run(self.job(part), seconds, lambda x, part=part: self.take(part, x))
                if seconds > 1
                else "no time"
            )
            if why is not None:
                self.omit(part.name, why)

    def take(self, part: Part, found: dict[str, Any]) -> None:
        """Keep what a part reports."""
        if "omit" in found:
            self.omit(f"{part.name}: {found['omit']}", found["why"])
            return
        self.limits = found if found.get("part") == "limits" else self.limits
        self.write({"shape": self.sizes.shape, **found})


def parse() -> tuple[argparse.Namespace, Sizes]:
    """The command line's options, and the sizes that follow from them. Raises ConfigError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU: the script itself is tested")
    parser.add_argument("--device", help="cuda, or cuda:N; the CPU in a dry run")
    parser.add_argument("--backend", default="auto")
    for name in ("shape", "formats", "batches", "contexts"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--parts", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "gpu.jsonl")
    args = parser.parse_args()
    args.device, args.parts = args.device or ("cpu" if args.dry_run else "cuda"), args.parts.split(",")
    if unknown := set(args.parts) - set(KINDS):
        raise ConfigError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    given: dict[str, Any] = {name: x for name in ("shape", "minutes") if (x := getattr(args, name))}
    try:
        given |= {n: tuple(map(int, x.split(","))) for n in ("batches", "contexts") if (x := getattr(args, n))}
    except ValueError:
        raise ConfigError("--batches and --contexts take whole numbers, such as 1,4,16") from None
    if args.formats:
        given["formats"] = tuple(str(QuantScheme.parse(f)) for f in args.formats.split(","))
    return args, replace(DRY if args.dry_run else Sizes(), **given)


def main() -> int:
    """Check, measure, summarize. Returns 2 if the options cannot be measured."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # runs every `finally`
    try:
        args, sizes = parse()
        devices.check(args.device)
        record.prepare(args.out)
        backend = ops.resolve(args.backend, args.device)
    except SameseedError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return 2
    shared = {"commit": record.commit(), "machine": record.machine(), "device": args.device, "dry_run": args.dry_run}
    shared |= {"backend": backend.name, "row_invariant": backend.row_invariant, "cuda": torch.version.cuda}
    run = Run(args, sizes, shared)
    run.write({"part": "plan", "sizes": asdict(sizes)})
    try:
        run.all()
    finally:  # an interrupted run is summarized too
        for worker in run.workers:
            worker.end()
        run.write({"part": "end", "left_out": run.left_out})
        print(f"records in {args.out}, errors in {run.log}")
        print(gpu_summary.text(run.lines), flush=True)
    return 0


if __name__ == "__main__":
    work() if "--worker" in sys.argv else sys.exit(main())
