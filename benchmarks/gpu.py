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
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
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


class TimeUp(BaseException):  # a BaseException, so that no `except Exception` swallows it
    """A part's time is over: its records so far stand, the rest is left out."""


def tell(job: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Append one record to the file of a run, and print it in one line."""
    if "omit" in found:
        found = {"part": "omit", "what": f"{job['name']}: {found['omit']}", "why": found["why"]}
        print(f"  left out: {found['what']}: {found['why']}", flush=True)
    with open(job["out"], "a", encoding="utf-8") as file:
        file.write(json.dumps({**job["shared"], "time": record.now(), "shape": job["plan"].shape, **found}) + "\n")
    if words := gpu_summary.words(found):
        print(f"  {words}", flush=True)


def work(job: dict[str, Any]) -> None:
    """In a process of its own: measure a part."""
    os.setsid()  # with all that it starts it can be killed at once
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end when the parent ends, so that the device is released
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)  # output of libraries goes to the log
    os.dup2(log, 2)

    def ring(*_: object) -> None:
        raise TimeUp

    say = partial(tell, job)
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, job["seconds"]))
    try:
        backend = ops.resolve(job["backend"], job["device"])
        module, name = PARTS[job["kind"]]
        function = getattr(importlib.import_module(module), name)
        function(job["plan"], backend, job["device"], say, **job["arguments"])
        if backend.name == "triton":  # ops whose kernel did not compile ran on the reference
            guard = importlib.import_module("sameseed.ops.triton.guard")
            say({"part": "broken", "kind": job["kind"], "ops": sorted(guard.broken)})
    except TimeUp:
        say({"omit": "the rest", "why": f"its {job['seconds']:.0f} s were over; what is recorded was done before"})
    except Exception as error:
        traceback.print_exc()
        say({"omit": "the rest", "why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]})
    os._exit(0)  # an orderly shutdown of the device context takes seconds, and may hang after a fault


class Run:
    """All parts, one after the other, each in a process forked from one that has imported everything."""

    def __init__(self, args: argparse.Namespace, sizes: Sizes, shared: Mapping[str, Any]) -> None:
        self.args, self.sizes, self.log = args, sizes, args.out.with_suffix(".log")
        self.job = {"plan": sizes, "device": args.device, "backend": args.backend, "out": args.out, "log": self.log}
        self.job |= {"name": "run", "shared": {"schema": SCHEMA, "run": record.now(), **shared}}
        self.until = time.monotonic() + 60 * sizes.minutes
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload([module for module, _ in PARTS.values()])

    def lines(self) -> list[dict[str, Any]]:
        """The records of this run so far."""
        found = [json.loads(line) for line in self.args.out.read_text().splitlines()]
        return [x for x in found if x["run"] == self.job["shared"]["run"]]

    def give(self, part: Part, seconds: float, **more: Any) -> None:
        """Run a part for at most `seconds`. A process that failed or hangs is ended and noted."""
        if part.kind == "costs":
            more["limits"] = next((x for x in self.lines() if x["part"] == "limits"), None)
        arguments = {**part.arguments, **more}
        job = {**self.job, "kind": part.kind, "name": part.name, "seconds": seconds, "arguments": arguments}
        worker = self.processes.Process(target=work, args=(job,), daemon=True)
        worker.start()
        try:
            worker.join(seconds + GRACE)
            if worker.exitcode is None:
                tell(job, {"omit": "the rest", "why": f"it did not answer after its {seconds:.0f} s and was killed"})
            elif worker.exitcode:
                last = self.log.read_bytes()[-2000:].decode(errors="replace").strip().splitlines()
                why = f"its process ended early: {last[-1][:300] if last else 'no word'}"
                tell(job, {"omit": "the rest", "why": why})
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)

    def all(self) -> None:
        """Compile the kernels in many processes at once, then run the parts in order of importance."""
        todo = parts(self.sizes, self.args.parts)
        warm = [p for p in todo if p.kind in ("costs", "speculation", "large")]
        if self.args.device != "cpu" and warm:
            with ThreadPoolExecutor(len(warm)) as pool:
                list(pool.map(lambda part: self.give(part, COMPILE, warm=True), warm))
        for i, part in enumerate(todo):
            later, left = sum(p.seconds for p in todo[i + 1 :]), self.until - time.monotonic()
            seconds = min(left, part.seconds + min(part.seconds, max(0.0, left - part.seconds - later)))
            print(f"{part.name} (at most {seconds:.0f} s, {left:.0f} s left)", flush=True)
            if seconds > 1:
                self.give(part, seconds)
            else:
                tell({**self.job, "name": part.name}, {"omit": "all of it", "why": "no time"})


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
    tell(run.job, {"part": "plan", "sizes": asdict(sizes)})
    try:
        run.all()
    finally:  # an interrupted run is summarized too
        left_out = [{"what": x["what"], "why": x["why"]} for x in run.lines() if x["part"] == "omit"]
        tell(run.job, {"part": "end", "left_out": left_out})
        print(f"records in {args.out}, errors in {run.log}")
        print(gpu_summary.text(run.lines()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
