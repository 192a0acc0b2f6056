"""The orchestrator's side of a worker: start it, ask it, freeze it while others are measured."""

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
    """A worker failed or ended; the text is for the record."""


class Client:
    """One worker process, frozen (SIGSTOP) unless it is asked something: no idle engine can spin, whatever it polls."""

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
                start_new_session=True,  # a group of its own: freezing takes its children too
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
        """Send a message, wait for its answer. Raises WorkerError if there is none in time; the worker is then gone."""
        assert self.process.stdin is not None
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise WorkerError(f"no answer to {message['do']!r} within {timeout:.0f} s") from None
        except OSError:  # its end of the pipe is closed
            line = None
        if line is None:
            with suppress(subprocess.TimeoutExpired):  # it is on its way out: its own status says more than a signal's
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
        """Send a signal to the worker and all that it started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def cpu_seconds(self) -> float:
        """Processor time that the worker and all that it started have used; 0 where there is no /proc or no worker."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended meanwhile
                fields = stat.read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == self.process.pid else 0
        return ticks / TICKS

    def close(self) -> None:
        """End the worker, kindly if it listens."""
        self.signal(signal.SIGCONT)
        try:
            if self.process.stdin is not None:
                self.process.stdin.write('{"do": "quit"}\n')
                self.process.stdin.close()
            self.process.wait(timeout=3)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
        with suppress(ProcessLookupError):  # also what it started, if it has ended itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def busy_and_stolen_seconds() -> tuple[float, float]:
    """Processor time of all processes of the machine, and what its host took away; zeros without /proc."""
    try:
        fields = [int(x) / TICKS for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0
    user, nice, system, _, _, irq, softirq, steal = fields
    return user + nice + system + irq + softirq, steal
