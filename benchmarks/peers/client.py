"""The orchestrator's side of a worker: starts it, sends it commands, and freezes it while others are measured."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().parent / "worker.py"
TICKS = os.sysconf("SC_CLK_TCK")


class WorkerError(Exception):
    """A worker failed or ended; the message goes into the record."""


class Client:
    """One worker process, frozen (SIGSTOP) except while it executes a command, so that idle engines use no CPU time."""

    def __init__(self, python: Path, engine: str, log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, str(WORKER), engine],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # its own process group, so that its children are frozen too
                env=environment,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, timeout: float, **message: Any) -> dict[str, Any]:
        """Send a message and return its answer. Without an answer in time, ends the worker and raises WorkerError."""
        assert self.process.stdin is not None
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise WorkerError(f"no answer to {message['do']!r} within {timeout:.0f} s") from None
        except OSError:  # the worker's end of the pipe is closed
            line = None
        if line is None:
            with suppress(subprocess.TimeoutExpired):  # it is exiting: its exit status says more than a kill's
                self.process.wait(timeout=10)
            self.close()
            raise WorkerError(
                f"the worker ended with status {self.process.returncode} at {message['do']!r}{self._said()}"
            )
        self.signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _said(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and all processes that it started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def cpu_seconds(self) -> float:
        """CPU seconds used by the worker and the processes it started; 0 without /proc or if the worker is gone."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # the process has ended meanwhile
                fields = stat.read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == self.process.pid else 0
        return ticks / TICKS

    def close(self) -> None:
        """End the worker: send it "quit", and kill its process group if it does not exit in 3 seconds."""
        self.signal(signal.SIGCONT)
        try:
            if self.process.stdin is not None:
                self.process.stdin.write('{"do": "quit"}\n')
                self.process.stdin.close()
            self.process.wait(timeout=3)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
        with suppress(ProcessLookupError):  # also ends processes that the worker started and left behind
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def busy_and_stolen_seconds() -> tuple[float, float]:
    """CPU seconds of all processes on the machine, and stolen seconds (taken by the host); zeros without /proc."""
    try:
        fields = [int(x) / TICKS for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0
    user, nice, system, _, _, irq, softirq, steal = fields
    return user + nice + system + irq + softirq, steal
