"""One engine in its own process, measured on command: JSON lines in, JSON lines out. Uses only the standard library.

    ENVIRONMENT/bin/python benchmarks/peers/worker.py ENGINE

    {"do": "load", "model": PATH, "threads": 2, "max_len": 640, "batch": 16, "options": {}}
                                                            -> {"versions": {}, "settings": {}}
    {"do": "rows", "rows": [1, 2, 4], "context": 256}       -> {"seconds": [...]}: one pass for each number of rows
    {"do": "prefill", "tokens": 512}                        -> {"seconds": ...}
    {"do": "batch", "size": 16, "context": 128, "steps": 16} -> {"seconds": ...} of all steps together
    {"do": "probe", "tokens": 24, "count": 64}              -> {"logits": [...]} after a fixed prompt
    {"do": "load_writer", "model": PATH, "draft": PATH or null, "threads": 2, "max_len": 640, "options": {}}
    {"do": "write", "prompt": [...], "count": 64}           -> {"seconds": ..., "text": [...]}: greedy token ids
    {"do": "quit"}

Each result also has "peak_rss_bytes". A command that fails is answered with {"error": text}, and one that the engine
does not offer with {"unsupported": text}; the worker then continues.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from protocol import Engine, UnsupportedError, Writer, die_with_parent

DOES = ("load", "rows", "prefill", "batch", "probe", "load_writer", "write")


class Worker:
    """Draws random tokens, calls the engine, and answers. The same seed gives every engine the same tokens."""

    engine: Engine
    writer: Writer

    def __init__(self, module: Any) -> None:
        self.module = module
        self.random = random.Random(0)
        self.vocab_size = 1000

    def tokens(self, count: int) -> list[int]:
        """Random token ids without special tokens (which are below 3 in the checkpoints)."""
        return [self.random.randrange(3, self.vocab_size) for _ in range(count)]

    def load(self, model: str, threads: int, max_len: int, batch: int, options: dict[str, Any]) -> dict[str, object]:
        take_cores(threads)
        self.engine = self.module.Engine()
        return self.engine.load(Path(model), threads, max_len, batch, options)

    def rows(self, rows: list[int], context: int) -> dict[str, object]:
        self.engine.rows(self.tokens(1), context)  # warms threads and caches, since another engine ran before
        return {"seconds": [self.engine.rows(self.tokens(m), context) for m in rows]}

    def prefill(self, tokens: int) -> dict[str, object]:
        return {"seconds": self.engine.prefill(self.tokens(tokens))}

    def batch(self, size: int, context: int, steps: int) -> dict[str, object]:
        return {"seconds": self.engine.batch([self.tokens(context) for _ in range(size)], steps)}

    def probe(self, tokens: int, count: int) -> dict[str, object]:
        fixed = random.Random(1)
        return {"logits": self.engine.probe([fixed.randrange(3, self.vocab_size) for _ in range(tokens)], count)}

    def load_writer(
        self, model: str, draft: str | None, threads: int, max_len: int, options: dict[str, Any]
    ) -> dict[str, object]:
        take_cores(threads)
        self.writer = self.module.Writer()
        return self.writer.load(Path(model), threads, max_len, Path(draft) if draft else None, options)

    def write(self, prompt: list[int], count: int) -> dict[str, object]:
        start = time.perf_counter()
        text = self.writer.write(prompt, count)
        return {"seconds": time.perf_counter() - start, "text": text}

    def answer(self, message: dict[str, Any]) -> dict[str, object]:
        """Execute one message and return its answer."""
        do = message.pop("do")
        if do not in DOES:
            return {"error": f"no command {do!r}"}
        try:
            result: dict[str, object] = getattr(self, do)(**message)
            return {**result, **memory()}
        except UnsupportedError as reason:
            return {"unsupported": str(reason)}
        except (Exception, SystemExit) as error:  # any library error goes into the record, instead of ending the worker
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}


def take_cores(threads: int) -> None:
    """Bind this process to `threads` cores, before any library counts the cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def memory() -> dict[str, object]:
    """Peak resident bytes of this process and its direct children (Linux reports KiB)."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            status = Path(f"/proc/{pid}/status").read_text()
            peak += 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return {"peak_rss_bytes": peak}


def serve(worker: Worker, incoming: TextIO, outgoing: TextIO) -> None:
    """Answer messages until "quit" or the end of input."""
    for line in incoming:
        message = json.loads(line)
        if message.get("do") == "quit":
            return
        outgoing.write(json.dumps(worker.answer(message)) + "\n")
        outgoing.flush()


def main() -> None:
    """Serve the engine named on the command line over stdin and stdout."""
    die_with_parent()
    outgoing = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # send the libraries' stdout to stderr, so that it does not mix with the protocol
    incoming = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module = importlib.import_module(f"engines.{sys.argv[1]}")
    serve(Worker(module), incoming, outgoing)
    outgoing.flush()
    os._exit(0)  # skip the shutdown: some libraries hang or crash in it, and all measurements are done


if __name__ == "__main__":
    main()
