"""`make bench-gpu`: all measurements on one GPU, in under 9 minutes, without a network.

    python benchmarks/gpu.py [--device cuda] [--formats bf16,w4a16] [--minutes 8.5] [--out RECORDS.jsonl]
    python benchmarks/gpu.py --dry-run        # everything at toy sizes on the CPU, in a few minutes

Writes one record per measurement as soon as it is done, and a last record that names what was left out, and why. Each
part runs in its own process, so a part that fails, hangs or breaks the device does not affect the others. At the end it
prints a table of aims and results. It needs only the checkout: no installed package, no native module
(docs/guides/gpu.md).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import gpu_checkout  # noqa: F401  # finds the package
import gpu_summary
import torch
from gpu_crew import Crew
from gpu_plan import (
    DRY,
    FULL,
    GIB,
    KINDS,
    WARM_BYTES,
    Clock,
    Part,
    Sizes,
    at_most,
    check_memory,
    numbers,
    parts,
    twin_bytes,
    warm_ups,
)

from sameseed import devices, ops
from sameseed.engine.memory import available_memory
from sameseed.errors import ConfigError, SameseedError
from sameseed.measure.shapes import get_shape
from sameseed.models.config import ModelConfig
from sameseed.report import record
from sameseed.scheme import QuantScheme

SCHEMA = "sameseed.gpu/1"
HERE = Path(__file__).resolve().parent
WORKER = HERE / "gpu_worker.py"


class Book:
    """The records of one run: appended to the file at once, and kept in memory for the table."""

    def __init__(self, path: Path, shared: Mapping[str, Any]) -> None:
        self.path = path
        self.shared = {"schema": SCHEMA, "run": record.now(), **shared}
        self.lines: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def write(self, found: Mapping[str, Any]) -> None:
        """Append one record, and print it in one line."""
        line = {**self.shared, "time": record.now(), **found}
        with self._lock:
            self.lines.append(line)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        words = gpu_summary.words(found)
        if words:
            print(f"  {words}", flush=True)


def parse() -> tuple[argparse.Namespace, Sizes]:
    """The command line's options, and the sizes that follow from them. Raises ConfigError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU: the script itself is tested")
    parser.add_argument("--device", help="cuda, or cuda:N; the CPU in a dry run")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--shape", help="of the passes and of the target's twin")
    parser.add_argument("--formats")
    parser.add_argument("--batches")
    parser.add_argument("--contexts")
    parser.add_argument("--parts", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--memory-share", type=float, default=0.9, help="of the free memory: the most that is taken")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu.jsonl")
    args = parser.parse_args()
    sizes = DRY if args.dry_run else FULL
    args.device = args.device or ("cpu" if args.dry_run else "cuda")
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(KINDS):
        raise ConfigError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    sizes = replace(sizes, shape=args.shape or sizes.shape, minutes=args.minutes or sizes.minutes)
    if args.formats:
        sizes = replace(sizes, formats=tuple(str(QuantScheme.parse(f)) for f in args.formats.split(",")))
    if args.batches:
        sizes = replace(sizes, batches=numbers(args.batches))
    if args.contexts:
        sizes = replace(sizes, contexts=numbers(args.contexts))
    return args, sizes


def plan(args: argparse.Namespace, sizes: Sizes, config: ModelConfig) -> dict[str, Any]:
    """The memory that each part needs, before anything is loaded. Raises ConfigError if a format's passes do not fit.

    Parts whose twins do not fit are removed from `args.parts`, and named under "unfit".
    """
    there = available_memory() if args.device == "cpu" else devices.free_memory(args.device)
    free = int(args.memory_share * there)
    found: dict[str, Any] = {"free": free, "unfit": {}}
    for format in sizes.formats if "costs" in args.parts else ():
        found[format] = check_memory(sizes, config, format, "bf16", free)
    draft = get_shape(sizes.draft_shape)
    for part, shape, format in (("speculation", sizes.shape, "bf16"), ("large", sizes.large_shape, sizes.large_format)):
        found[part] = twin_bytes(get_shape(shape), draft, format, sizes.workspace)
        if part in args.parts and found[part] > free:
            found["unfit"][part] = f"{shape} in {format} needs {found[part] / GIB:.1f} GiB, {free / GIB:.1f} are free"
            args.parts.remove(part)
    return found


class Measurement:
    """Runs all parts in turn. Each part has a time limit; unused time goes to later parts."""

    def __init__(self, args: argparse.Namespace, sizes: Sizes, crew: Crew, book: Book, free: int) -> None:
        self.sizes, self.crew, self.book, self.free = sizes, crew, book, free
        self.parts: list[str] = args.parts
        self.clock = Clock(sizes.minutes)
        self.shared = {"sizes": asdict(sizes), "device": args.device, "backend": args.backend}
        self.limits: dict[str, Any] | None = None

    def run(self) -> None:
        """Compile the kernels, then run the parts in order of importance."""
        todo = parts(self.sizes, self.parts)
        if "compiling" in self.parts:
            self.compile(todo)
        while todo:
            part = todo.pop(0)
            seconds = self.clock.share(part, todo)
            print(f"{part.name} (at most {seconds:.0f} s, {self.clock.left():.0f} s left)", flush=True)
            why = self.one(part, seconds, bool(todo)) if seconds else "no time"
            if why is not None:
                self.clock.omit(part.name, why)

    def compile(self, todo: list[Part]) -> None:
        """Launch all kernels that the parts need, in many processes at once, so that Triton's cache has them."""
        part = Part("compiling", "compiling", self.sizes.seconds["compiling"])
        jobs = [{**self.shared, **job} for job in warm_ups(self.sizes, self.parts)]
        seconds = self.clock.share(part, todo)
        at_once = min(max(1, (os.cpu_count() or 2) - 2), max(1, self.free // WARM_BYTES - 5))
        print(f"compiling, {min(at_once, len(jobs))} at once (at most {seconds:.0f} s)", flush=True)
        for job, why in self.crew.run_all(jobs, seconds, self.take("compiling"), at_once):
            what = " ".join([job.get("shape", ""), job.get("format") or ", ".join(job.get("formats", ()))]).strip()
            self.clock.omit(f"compiling for {job['kind']} {what}".strip(), why)

    def one(self, part: Part, seconds: float, more: bool) -> str | None:
        """Run one part; returns None, or the reason if it failed."""
        more_arguments = {"limits": self.limits} if part.kind in ("costs", "micro") else {}
        job = {**self.shared, "kind": part.kind, **part.arguments, **more_arguments}
        return self.crew.run(job, seconds, self.take(part.name), more)

    def take(self, name: str) -> Any:
        """A function that handles what part `name` reports: records are written, omissions noted."""

        def take(found: dict[str, Any]) -> None:
            if "omit" in found:
                self.clock.omit(f"{name}: {found['omit']}", found["why"])
                return
            if found.get("part") == "limits":
                self.limits = found
            self.book.write({"shape": self.sizes.shape, **found})

        return take


def main() -> int:
    """Check, plan, measure, summarize. Returns 2 if the options cannot be measured."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)  # runs every `finally`, so that no process is left behind

    signal.signal(signal.SIGTERM, end)
    try:
        args, sizes = parse()
        devices.check(args.device)
        record.prepare(args.out)
        backend = ops.resolve(args.backend, args.device)
        config = get_shape(sizes.shape)
        sizes = replace(
            sizes,
            contexts=at_most(sizes.contexts, config.max_model_len - max(sizes.rows)),
            prompts=at_most(sizes.prompts, config.max_model_len),
        )
        planned = plan(args, sizes, config)
    except SameseedError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return 2
    shared: dict[str, Any] = {
        "commit": record.commit(), "machine": record.machine(), "device": args.device, "dry_run": args.dry_run,
        "backend": backend.name, "row_invariant": backend.row_invariant, "cuda": torch.version.cuda,
    }  # fmt: skip
    if shared["machine"]["isa"] is None:
        print("no native module: tokens are chosen by PyTorch, and the host's share is larger (docs/guides/gpu.md)")
    book = Book(args.out, shared)
    book.write({"part": "plan", "bytes": planned, "sizes": asdict(sizes)})
    log = args.out.with_suffix(".log")
    with Crew([sys.executable, str(WORKER)], log) as crew:
        work = Measurement(args, sizes, crew, book, planned["free"])
        for part, why in planned["unfit"].items():
            work.clock.omit(part, why)
        try:
            work.run()
        finally:  # an interrupted run is summarized too
            left_out = work.clock.left_out
            book.write({"part": "end", "seconds": 60 * sizes.minutes - work.clock.left(), "left_out": left_out})
            print(f"records in {book.path}, errors in {log}")
            print(gpu_summary.text(book.lines), flush=True)  # table of aims and results
    return 0


if __name__ == "__main__":
    sys.exit(main())
