"""Passes a second while other processes keep the cores busy: what a thread pool that spins would lose.

    .venv/bin/python benchmarks/loaded.py [RECORDS.jsonl]

For each number of busy processes: passes of the embedded target over five rows, alone and beside them, in turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from sameseed import ops
from sameseed.batch import Rows, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.models.loader import load_model, resolve_model
from sameseed.study import record

SECONDS, REPEAT = 1.5, 5
OUT = Path(__file__).parent / "results" / "loaded.jsonl"


def main() -> None:
    """Measure and print, and append to the file named on the command line."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    here = record.machine()
    backend = ops.resolve("cpu")
    model = load_model(resolve_model("embedded"), backend)
    c = model.config
    cache = KVCache(c.num_layers, 32, 16, c.num_kv_heads, c.head_dim, "bf16")
    batch = build_batch([Rows([5], 200, [6, 7, 8, 9], [-1, 0, 1, 2], range(14), True)], 16)

    def rate() -> float:
        passes, end = 0, time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            model.forward(batch, cache)
            passes += 1
        return passes / SECONDS

    rate()
    for busy in (1, 2, 4):
        runs = []
        for _ in range(REPEAT):
            alone = rate()
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
            try:
                time.sleep(0.2)
                runs.append({"alone": alone, "beside": rate()})
            finally:
                for other in others:
                    other.kill()
                    other.wait()
        line = {
            "schema": "sameseed.loaded/1",
            "time": record.now(),
            "commit": record.commit(),
            "machine": here,
            "busy_processes": busy,
            "repetitions": runs,
            "slowdown": median(r["alone"] / r["beside"] for r in runs),
        }
        print(f"{busy} busy processes: {line['slowdown']:.2f} times slower")
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
