"""Starts and ends the server's child processes, in this file only: by a fixed command, at one end of a socket pair."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Literal

SECRETS = ("SAMESEED_API_KEY",)  # variables of the server that child processes do not get
# Environment variables for helper processes: what Python needs to start, and how texts are encoded. Helpers run
# templates and grammars of third parties, which must not see e.g. a hub token.
PLAIN = ("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TMPDIR", "TZ", "LANG")
# Signals that a terminal or an operator sends to all processes of the server at once. They are for the server alone:
# child processes end when their socket closes.
SERVERS_OWN = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
PLAIN_PREFIXES = ("LC_", "LD_", "OMP_", "OPENBLAS_", "MKL_", "COVERAGE_", "COV_CORE_")


def spawn(program: Literal["worker", "aside"], *arguments: str) -> tuple[int, socket.socket]:
    """Start a worker or a helper; returns its process id and our end of the socket.

    A helper gets only the variables named above, a worker all but SECRETS. (multiprocessing's spawn passes on all.)
    """
    ours, theirs = socket.socketpair()
    with theirs:
        os.set_inheritable(theirs.fileno(), True)
        known = {k: v for k, v in os.environ.items() if k in PLAIN or k.startswith(PLAIN_PREFIXES)}
        environment = {k: v for k, v in (os.environ if program == "worker" else known).items() if k not in SECRETS}
        root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        safe = ["-P"] if sys.version_info >= (3, 11) else []  # nothing is imported from the working directory
        command = [sys.executable, *safe, "-m", f"sameseed.server.{program}", str(theirs.fileno()), *arguments]
        try:
            pid = os.posix_spawn(sys.executable, command, environment, setsigmask=SERVERS_OWN)
        except BaseException:
            ours.close()
            raise
    ours.setblocking(False)
    return pid, ours


async def end(pid: int, patience: float) -> int:
    """Wait `patience` seconds for a process to end by itself, then kill it; returns its exit code."""
    until = time.monotonic() + patience
    try:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                until = float("inf")
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:  # the server itself ends, and leaves no process behind
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
