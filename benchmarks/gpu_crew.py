"""Worker processes: one per part, so that a fault, a hang or a full memory affects only one part.

The next worker is started ahead: it imports everything before its turn, and does not use the device until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

GRACE = 4.0  # seconds past its time before a part is killed: a process that hangs in a kernel gets no alarm signal
Take = Callable[[dict[str, Any]], None]


def with_parent() -> None:
    """End this process when its parent ends (Linux), so that the device is released."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Worker:
    """One worker process. It reads a job (one JSON line) from stdin and writes JSON lines; stderr goes to `log`."""

    def __init__(self, command: Seq[str], log: Path) -> None:
        self.log, self.at = log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )

    def run(self, job: Mapping[str, Any], seconds: float, take: Take) -> str | None:
        """Run a job for at most `seconds`, and call `take` with each line. Returns None, or the reason of a failure."""
        assert self.process.stdin is not None and self.process.stdout is not None
        late = threading.Event()
        alarm = threading.Timer(seconds + GRACE, lambda: (late.set(), self.end()))
        alarm.start()
        done = False
        try:
            with contextlib.suppress(BrokenPipeError):  # the worker has ended; its exit code is read below
                times = {"seconds": seconds, "until": time.monotonic() + seconds}  # all processes share this clock
                self.process.stdin.write(json.dumps({**job, **times}).encode() + b"\n")
                self.process.stdin.close()
            for line in self.process.stdout:
                try:
                    found = dict(json.loads(line))
                except (ValueError, TypeError):  # a damaged line: log it, and keep reading the others
                    with self.log.open("ab") as log:
                        log.write(b"no record: " + line.rstrip()[:300] + b"\n")
                    continue
                if "done" in found:
                    done = True
                else:
                    take(found)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        finally:
            alarm.cancel()
            hangs = self.process.returncode is None
            self.end()
            self.process.stdout.close()
        code = self.process.returncode
        if hangs or late.is_set():  # a driver can keep a finished process from exiting: if "done" came, all is well
            return None if done else f"it did not answer after its {seconds:.0f} s and was killed"
        if code == 0 and done:
            return None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        with self.log.open("rb") as file:
            file.seek(self.at)
            said = [x.strip() for x in file.read()[-20_000:].decode(errors="replace").splitlines() if x.strip()]
        return f"its process ended early ({how}): {said[-1][:300] if said else 'it said nothing'}"

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        if self.process.returncode is None:  # not waited for yet, so its process id cannot be reused
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Crew:
    """Workers, one of them started ahead. As a context manager it leaves no process behind."""

    def __init__(self, command: Seq[str], log: Path) -> None:
        self.command, self.log = command, log
        self._spare: Worker | None = None
        self._all: list[Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._closed, self._spare = True, None  # otherwise jobs in `run_all` would start further workers
        for worker in self._all:
            worker.end()

    def _start(self) -> Worker:
        if self._closed:
            raise RuntimeError("the processes of this run were ended; no more are started")
        self._all.append(Worker(self.command, self.log))
        return self._all[-1]

    def prepare(self) -> None:
        """Start a worker ahead, unless there is one."""
        with self._lock:
            self._spare = self._spare or self._start()

    def run(self, job: Mapping[str, Any], seconds: float, take: Take, more: bool = True) -> str | None:
        """Run a job in the worker that was started ahead, as Worker.run does. `more`: start another worker ahead."""
        self.prepare()
        worker, self._spare = self._spare, None
        assert worker is not None
        if more:
            self.prepare()
        return worker.run(job, seconds, take)

    def run_all(
        self, jobs: Seq[Mapping[str, Any]], seconds: float, take: Take, at_once: int
    ) -> list[tuple[Mapping[str, Any], str]]:
        """Run jobs in parallel, `at_once` at a time, all within `seconds`. Returns the failed jobs with reasons.

        The worker for the next part is started meanwhile.
        """
        self.prepare()
        end = time.monotonic() + seconds

        def work(job: Mapping[str, Any]) -> str | None:
            remaining = end - time.monotonic()
            if remaining <= 1:
                return "no time"
            with self._lock:
                worker = self._start()
            return worker.run(job, remaining, take)

        pool = ThreadPoolExecutor(max(1, min(at_once, len(jobs))))
        try:
            found = list(pool.map(work, jobs))
        finally:  # after an interrupt, no waiting job may start
            pool.shutdown(wait=False, cancel_futures=True)
        return [(job, why) for job, why in zip(jobs, found, strict=True) if why is not None]
