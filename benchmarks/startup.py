"""How long `sameseed --help` takes: a record line of wall and CPU time, medians of fresh processes.

    .venv/bin/python benchmarks/startup.py [RECORDS.jsonl]

Speed is measured here and asserted nowhere. CPU time is the figure to compare on a machine that does other things too.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from sameseed.cli import COMMANDS
from sameseed.study import record

REPEAT = 9
OUT = Path(__file__).parent / "results" / "startup.jsonl"


def run(argv: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print, or append to the file named on the command line."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    here = record.machine()
    for argv in (["--help"], *([name, "--help"] for name in COMMANDS)):
        runs = [run([sys.executable, "-m", "sameseed", *argv]) for _ in range(REPEAT)]
        line = {
            "schema": "sameseed.startup/1",
            "time": record.now(),
            "commit": record.commit(),
            "machine": here,
            "command": " ".join(["sameseed", *argv]),
            "repetitions": [{"wall_s": wall, "cpu_s": cpu} for wall, cpu in runs],
            "wall_s": median(wall for wall, _ in runs),
            "cpu_s": median(cpu for _, cpu in runs),
        }
        print(f"{line['command']:28} {line['wall_s']:.3f} s ({line['cpu_s']:.3f} s of CPU time)")
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
