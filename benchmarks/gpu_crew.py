"""Processes that measure: each part has one of its own, so that a fault, a hang or a full memory costs one part only.

A spare one is always started ahead: it has imported everything when its turn comes, and touches no device before.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

GRACE = 4.0  # seconds past its time in which a part may end by itself: a kernel that hangs does not hear the alarm
Take = Callable[[dict[str, Any]], None]


def with_parent() -> None:
    """End when the process that started this one ends (Linux): a device must not stay taken."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Worker:
    """One process. It reads a job from its input, a line of JSON, and writes lines of JSON; its errors go to `log`."""

    def __init__(self, command: Seq[str], log: Path) -> None:
        self.log, self.at = log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )

    def run(self, job: Mapping[str, Any], seconds: float, take: Take) -> str | None:
        """Do a job in its time, and `take` every line as it comes. Why it did not end well, if it did not."""
        assert self.process.stdin is not None
        try:
            times = {"seconds": seconds, "until": time.monotonic() + seconds}  # one clock for all processes
            self.process.stdin.write(json.dumps({**job, **times}).encode() + b"\n")
            self.process.stdin.close()
        except OSError:
            return self._ended()
        done = self._listen(time.monotonic() + seconds + GRACE, take)
        return f"it did not answer after its {seconds:.0f} s and was killed" if done is None else self._ended(done)

    def _listen(self, end: float, take: Take) -> bool | None:
        """Take lines until the output ends; whether the last of them said so. None: the time is over."""
        assert self.process.stdout is not None
        pipe, rest, done = self.process.stdout.fileno(), b"", False
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.kill()
                return None
            data = os.read(pipe, 1 << 16)
            if not data:
                return done
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    found = dict(json.loads(line))
                except (ValueError, TypeError):  # damaged: what else it tells is not
                    with self.log.open("ab") as log:
                        log.write(b"no record: " + line[:300] + b"\n")
                    continue
                if "done" in found:
                    done = True
                else:
                    take(found)

    def _ended(self, done: bool = False) -> str | None:
        try:
            code = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:  # a device's driver may hold it: what it measured is here
            self.kill()
            return None if done else "it closed its output and did not end"
        if code == 0 and done:
            return None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process ended early ({how}): {self.last_words()}"

    def last_words(self) -> str:
        """The last line of its errors."""
        with self.log.open("rb") as file:
            file.seek(self.at)
            lines = file.read()[-20_000:].decode(errors="replace").splitlines()
        return next((x.strip() for x in reversed(lines) if x.strip()), "it said nothing")[:300]

    def end(self) -> None:
        """End it and all that it started, at once. Its output stays open: another thread may be reading it."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill(self) -> None:
        """The same, and nothing more is read."""
        self.end()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Crew:
    """Workers, one of them ahead. As a context it leaves no process behind."""

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
            self._closed = True  # jobs side by side would start the next ones
        for worker in self._all:
            worker.end()
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    def _start(self) -> Worker:
        if self._closed:
            raise RuntimeError("the processes of this run were ended; no more are started")
        worker = Worker(self.command, self.log)
        self._all = [w for w in self._all if w.process.poll() is None] + [worker]
        return worker

    def prepare(self) -> None:
        """Start one ahead, unless there is one."""
        with self._lock:
            self._spare = self._spare or self._start()

    def run(self, job: Mapping[str, Any], seconds: float, take: Take, more: bool = True) -> str | None:
        """Do a job in the process that was started ahead; as Worker.run. `more`: another one will follow."""
        self.prepare()
        with self._lock:
            worker, self._spare = self._spare, None
        assert worker is not None
        if more:
            self.prepare()
        try:
            return worker.run(job, seconds, take)
        finally:
            worker.kill()

    def run_all(
        self, jobs: Seq[Mapping[str, Any]], seconds: float, take: Take, at_once: int
    ) -> list[tuple[Mapping[str, Any], str]]:
        """Do jobs side by side, `at_once` of them, all within the time; those that failed, and why.

        Meanwhile the process for what comes next is started.
        """
        self.prepare()
        end, left = time.monotonic() + seconds, list(jobs)
        failed: list[tuple[Mapping[str, Any], str]] = []

        def work() -> None:
            while True:
                with self._lock:
                    if not left or self._closed:
                        return
                    job = left.pop(0)
                    remaining = end - time.monotonic()
                    worker = self._start() if remaining > 1 else None
                try:
                    why = "no time" if worker is None else worker.run(job, remaining, take)
                finally:
                    if worker is not None:
                        worker.kill()
                if why is not None:
                    failed.append((job, why))

        threads = [threading.Thread(target=work) for _ in range(max(1, min(at_once, len(jobs))))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # also where it is interrupted: no job that is left may start then
            with self._lock:
                left.clear()
        return failed
