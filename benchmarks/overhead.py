"""What HTTP costs per streamed token at concurrency 1: the engine alone against the same requests through a server.

    .venv/bin/python benchmarks/overhead.py [--repeat 9] [--tokens 400] [--out RECORDS.jsonl]

Both take turns, in one run on one machine, with the same model, threads and seed; the engine alone writes in this
process, the server's in its own. `overhead_ms` is the wall time that the path adds to a token; it means something on a
machine that does nothing else. `path_cpu_ms` does elsewhere too: the CPU time of the server's process for each token,
and what the engine's process takes beyond the engine alone. Of that time the engine waits for none: it computes the
next token while the server writes out the last one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from sameseed import LLM, SamplingParams
from sameseed.study import record

OUT = Path(__file__).parent / "results" / "overhead.jsonl"
PROMPT = "def add(a, b):"


class Served:
    """A server, asked by the plainest client there is."""

    def __init__(self, flags: list[str]) -> None:
        command = [sys.executable, "-m", "sameseed", "serve", "--port", "0", *flags]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            entry = json.loads(line)
            if entry["message"] == "ready":
                self._address = entry["url"].removeprefix("http://")
                break
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        worker = b"sameseed.server.worker"
        self.engine_pid = next(int(c) for c in children if worker in Path(f"/proc/{c}/cmdline").read_bytes())

    @property
    def pid(self) -> int:
        return self._process.pid

    def stream(self, fields: dict[str, Any]) -> tuple[float, int, str]:
        """Seconds from the first event to the last, events, text."""
        connection = http.client.HTTPConnection(self._address)
        body = json.dumps({"prompt": PROMPT, "stream": True, **fields})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        times, text = [], []
        while line := response.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                text.append(json.loads(line[6:])["choices"][0]["text"])
        connection.close()
        return times[-1] - times[0], len(times), "".join(text)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, over all its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def alone(llm: LLM, params: SamplingParams) -> tuple[float, int, str]:
    """The same of the engine without a server."""
    times, text = [], []
    for delta in llm.stream(PROMPT, params):
        times.append(time.perf_counter())
        text.append(delta.text)
    return times[-1] - times[0], len(times), "".join(text)


def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    llm = LLM("embedded", threads=1)
    server = Served(["--model", "embedded", "--draft", "none", "--threads", "1"])
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": args.tokens, "ignore_eos": True}
    rows: list[dict[str, float]] = []
    try:
        alone(llm, SamplingParams(**common)), server.stream(common)
        for turn in range(args.repeat):
            row: dict[str, float] = {}
            for who in ("engine", "http") if turn % 2 == 0 else ("http", "engine"):
                if who == "engine":
                    cpu = cpu_seconds(os.getpid())
                    seconds, _, mine = alone(llm, SamplingParams(**common))
                    row["engine_cpu_ms"] = (cpu_seconds(os.getpid()) - cpu) / args.tokens * 1e3
                    row["engine_ms"] = seconds / (args.tokens - 1) * 1e3
                else:
                    before = cpu_seconds(server.pid), cpu_seconds(server.engine_pid)
                    seconds, _, its = server.stream(common)
                    spent = cpu_seconds(server.pid) - before[0]
                    row["http_ms"] = seconds / (args.tokens - 1) * 1e3
                    row["server_cpu_ms"] = spent / args.tokens * 1e3
                    row["engine_process_cpu_ms"] = (cpu_seconds(server.engine_pid) - before[1]) / args.tokens * 1e3
            assert mine == its, "one text"
            row["overhead_ms"] = row["http_ms"] - row["engine_ms"]
            row["path_cpu_ms"] = row["server_cpu_ms"] + max(0.0, row["engine_process_cpu_ms"] - row["engine_cpu_ms"])
            rows.append(row)
            print("  ".join(f"{k} {v:.3f}" for k, v in row.items()))
    finally:
        server.close()
    line = {
        "schema": "sameseed.overhead/1",
        "time": record.now(),
        "commit": record.commit(),
        "machine": record.machine(),
        "config": {"model": "embedded", "draft": "none", "threads": 1, "concurrency": 1, **common},
        "repetitions": rows,
        **{key: median(row[key] for row in rows) for key in rows[0]},
    }
    print({key: round(line[key], 4) for key in rows[0]})
    with args.out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
