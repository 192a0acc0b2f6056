"""Runs one part of `make bench-gpu` in its own process: reads a job (one JSON line), and writes JSON lines.

`gpu.py` starts it ahead of its turn. It imports everything before it reads the job, and does not use the device before.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

import gpu_checkout  # noqa: F401  # finds the package

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from gpu_crew import with_parent
from gpu_plan import Sizes

from sameseed import ops

PARTS = {
    "limits": ("gpu_parts", "measure_limits"),
    "warm": ("gpu_parts", "warm_up"),
    "costs": ("gpu_parts", "measure_costs"),
    "speculation": ("gpu_twins", "measure_speculation"),
    "large": ("gpu_twins", "measure_large"),
    "micro": ("gpu_micro", "measure_micro"),
    "transformers": ("gpu_peers", "measure_transformers"),
}


def prepare() -> None:
    """Import the modules of all parts. Import errors are ignored here; the part that needs the module reports them."""
    for module, _ in PARTS.values():
        with suppress(Exception):
            importlib.import_module(module)


class TimeUp(BaseException):  # a BaseException, so that no `except Exception` swallows it
    """A part's time is over: its records so far stand, the rest is left out."""


def do(job: dict[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Run one job: `kind` names a function, and the job's own fields are its arguments."""
    sizes, device = Sizes.from_dict(job["sizes"]), job["device"]
    backend = ops.resolve(job["backend"], device)
    known = ("kind", "sizes", "device", "backend", "seconds", "until")
    own = {name: x for name, x in job.items() if name not in known}
    module, name = PARTS[job["kind"]]
    function = getattr(importlib.import_module(module), name)
    try:
        function(sizes, backend, device, tell, **own)
    finally:
        if backend.name == "triton":  # ops whose kernel did not compile ran on the reference: their times mean nothing
            guard = importlib.import_module("sameseed.ops.triton.guard")
            tell({"part": "broken", "kind": job["kind"], "ops": sorted(guard.broken)})


def main() -> int:
    """Run the job from stdin. Returns 0 or exits with 0; whatever was left out is reported in the output lines."""
    with_parent()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to the log

    def tell(**found: Any) -> None:
        print(json.dumps(found), file=out, flush=True)

    prepare()
    line = sys.stdin.readline()
    if not line.strip():
        return 0  # no job: the parent does not need this worker
    job = json.loads(line)

    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeUp

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, job["until"] - time.monotonic()))
    try:
        do(job, lambda found: tell(**found))
    except TimeUp:
        tell(omit="the rest", why=f"its {job['seconds']:.0f} s were over; what is recorded was done before")
    except Exception as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        traceback.print_exc()
        said = str(error).strip().splitlines()
        tell(omit="the rest", why=f"{type(error).__name__}: {said[0] if said else ''}"[:300])
    signal.setitimer(signal.ITIMER_REAL, 0)
    tell(done=True)
    out.flush()
    # Exit immediately: an orderly shutdown of the device context takes seconds, and may hang after a fault.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
