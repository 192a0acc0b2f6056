"""`make bench-gpu`: everything that is measured on one GPU, in under 9 minutes, without a network.

    .venv/bin/python benchmarks/gpu.py [--device cuda] [--formats bf16,w4a16] [--minutes 8.8] [--out RECORDS.jsonl]
    .venv/bin/python benchmarks/gpu.py --dry-run        # all of it at toy sizes on the CPU, in under a minute

One record a measurement, appended as soon as it is there, and a last one that says what was left out, and why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_parts
import gpu_plot
import torch
from gpu_plan import DRY, FULL, GIB, Clock, Sizes, at_most, check_memory, numbers, twin_bytes

from foretoken import ops
from foretoken.engine.memory import available_memory
from foretoken.errors import ConfigError, ForetokenError
from foretoken.formats.scheme import QuantScheme
from foretoken.models.config import ModelConfig
from foretoken.models.loader import resolve_model
from foretoken.models.save import source_config
from foretoken.ops import devices
from foretoken.study import record
from foretoken.study.limits import measure_limits
from foretoken.study.shapes import SHAPES

SCHEMA = "foretoken.gpu/1"
HERE = Path(__file__).resolve().parent
PARTS = ("costs", "transformers", "vllm", "speculation", "large")


class Book:
    """The records of one run: on disk as they come, and in memory for the plot."""

    def __init__(self, path: Path, shared: Mapping[str, Any]) -> None:
        self.path = path
        self.shared = {"schema": SCHEMA, "run": record.now(), **shared}
        self.lines: list[dict[str, Any]] = []

    def write(self, found: Mapping[str, Any]) -> None:
        """Append one record, and say it in a line."""
        line = {**self.shared, "time": record.now(), **found}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        kept = ("shape", "engine", "format", "mode", "arm", "kind", "context", "rows", "batch")
        words = [f"{name} {found[name]}" for name in kept if found.get(name) is not None]
        units = {
            "median_ms": "ms",
            "c": "times one row",
            "read_share": "of bandwidth",
            "tokens_per_s": "tokens/s",
            "speedup": "x",
        }
        words += [f"{found[name]:.3g} {unit}" for name, unit in units.items() if isinstance(found.get(name), float)]
        if words:
            print("  " + ", ".join(words), flush=True)


def parse() -> tuple[argparse.Namespace, Sizes]:
    """Flags, and the sizes that they come to. Raises ConfigError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU: the script itself is tested")
    parser.add_argument("--device", help="cuda, or cuda:N; the CPU in a dry run")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--shape", help="of the passes and of the target's twin")
    parser.add_argument("--formats")
    parser.add_argument("--batches")
    parser.add_argument("--contexts")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--memory-share", type=float, default=0.9, help="of the free memory: the most that is taken")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu.jsonl")
    args = parser.parse_args()
    sizes = DRY if args.dry_run else FULL
    args.device = args.device or ("cpu" if args.dry_run else "cuda")
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        raise ConfigError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    sizes = replace(sizes, shape=args.shape or sizes.shape, minutes=args.minutes or sizes.minutes)
    if args.formats:
        sizes = replace(sizes, formats=tuple(str(QuantScheme.parse(f)) for f in args.formats.split(",")))
    if args.batches:
        sizes = replace(sizes, batches=numbers(args.batches))
    if args.contexts:
        sizes = replace(sizes, contexts=numbers(args.contexts))
    return args, sizes


def raw_shape(name: str) -> dict[str, Any]:
    """The config.json of a shape, for other engines."""
    return dict(SHAPES[name]) if name in SHAPES else dict(source_config(resolve_model(name)))


def ask_peer(name: str, sizes: Sizes, device: str, seconds: float, book: Book) -> str | None:
    """Measure another engine in a process of its own; why not, or not all, if so."""
    if importlib.util.find_spec(name) is None:
        return "it is not installed"
    asked = {"raw": raw_shape(sizes.shape), "device": device, "batches": list(sizes.batches),
             "context": sizes.batch_context, "prompt": sizes.prompts[-1]}  # fmt: skip
    command = [sys.executable, str(HERE / "gpu_peers.py"), name, json.dumps(asked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        why = None
        try:
            out, errors = process.communicate(timeout=max(1.0, seconds - 1.0))
        except subprocess.TimeoutExpired:
            why = f"its {seconds:.0f} s were over; what is recorded was done before"
        finally:  # an alarm, an interrupt: no process is left behind
            if process.poll() is None:
                process.kill()
        if why is not None:
            out, errors = process.communicate()
        for line in out.splitlines():
            if line.startswith("{"):
                book.write({"part": "peers", "shape": sizes.shape, **json.loads(line)})
        if why is None and process.returncode:
            why = next((x for x in reversed(errors.splitlines()) if x.strip()), "it failed")[:300]
    return why


def plan(args: argparse.Namespace, sizes: Sizes, config: ModelConfig) -> dict[str, Any]:
    """The memory of every part, before anything is loaded. Raises ConfigError where a format's passes do not fit.

    Parts with twins that do not fit are left out of `args.parts`, and named in "unfit".
    """
    there = available_memory() if args.device == "cpu" else devices.free_memory(args.device)
    free = int(args.memory_share * there)
    found: dict[str, Any] = {"free": free, "unfit": {}}
    for format in sizes.formats if "costs" in args.parts else ():
        found[format] = check_memory(sizes, config, format, "bf16", free)
    draft = gpu_parts.shape_of(sizes.draft_shape)
    for part, shape, format in (("speculation", sizes.shape, "bf16"), ("large", sizes.large_shape, "w4a16")):
        found[part] = twin_bytes(gpu_parts.shape_of(shape), draft, format, sizes.workspace)
        if part in args.parts and found[part] > free:
            found["unfit"][part] = f"{shape} in {format} needs {found[part] / GIB:.1f} GiB, {free / GIB:.1f} are free"
            args.parts.remove(part)
    return found


def measure(
    args: argparse.Namespace, sizes: Sizes, backend: ops.Ops, config: ModelConfig, book: Book, unfit: Mapping[str, str]
) -> Clock:
    """All parts in turn; each ends in its time, and what is left over goes to the next."""
    clock, device = Clock(sizes.minutes), args.device
    for part, why in unfit.items():
        clock.omit(part, why)
    limits = None
    with clock.part("limits", sizes.seconds["limits"]):
        limits = measure_limits(ops.num_threads(), repeats=3, device=device)
        book.write({"part": "limits", **limits.as_dict()})
    if "costs" in args.parts:
        with clock.part("compiling", sizes.seconds["compiling"]):
            gpu_parts.warm_up(sizes, config, backend, device)
    for format in sizes.formats:
        if limits is not None and "costs" in args.parts:
            with clock.part(f"costs of {format}", sizes.seconds["costs"]):
                gpu_parts.measure_costs(sizes, config, format, backend, device, limits, book.write)
    gpu_parts.forget(device)
    for peer in ("transformers", "vllm"):
        if peer in args.parts:
            with clock.part(peer, sizes.seconds[peer]) as seconds:
                why = ask_peer(peer, sizes, device, seconds, book)
                if why is not None:
                    clock.omit(peer, why)
    if "speculation" in args.parts:
        with clock.part("speculation", sizes.seconds["speculation"]):
            gpu_parts.measure_speculation(sizes, backend, device, book.write, clock.omit)
    if "large" in args.parts:
        with clock.part("large", sizes.seconds["large"]):
            gpu_parts.measure_large(sizes, backend, device, book.write)
    return clock


def main() -> int:
    """Check, plan, measure, plot. 2 for what cannot be measured as asked."""
    try:
        args, sizes = parse()
        devices.check(args.device)
        record.prepare(args.out)
        backend = ops.resolve(args.backend, args.device)
        config = gpu_parts.shape_of(sizes.shape)
        sizes = replace(
            sizes,
            contexts=at_most(sizes.contexts, config.max_model_len - max(sizes.rows)),
            prompts=at_most(sizes.prompts, config.max_model_len),
        )
        planned = plan(args, sizes, config)
    except ForetokenError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return 2
    shared = {"commit": record.commit(), "machine": record.machine(), "device": args.device, "dry_run": args.dry_run,
              "backend": backend.name, "row_invariant": backend.row_invariant, "cuda": torch.version.cuda}  # fmt: skip
    book = Book(args.out, shared)
    book.write({"part": "plan", "bytes": planned, "sizes": {**vars(sizes)}})
    clock = measure(args, sizes, backend, config, book, planned["unfit"])
    book.write({"part": "end", "seconds": 60 * sizes.minutes - clock.left(), "left_out": clock.left_out})
    written = gpu_plot.draw(book.lines, args.out.with_suffix(".png"))
    print(f"records in {args.out}" + (f", plot in {written}" if written else "; no plot"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
