"""Processes of ours: started by a fixed command at the end of a socket pair, ended for sure; only here."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Literal

SECRETS = ("SAMESEED_API_KEY",)  # of the server's environment, not of theirs
# What a program beside the server may know of its environment: what Python needs to start, and how texts are encoded.
# Templates and grammars of others run there: a token of some hub, say, is nothing to them.
PLAIN = ("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TMPDIR", "TZ", "LANG")
PLAIN_PREFIXES = ("LC_", "LD_", "OMP_", "OPENBLAS_", "MKL_", "COVERAGE_", "COV_CORE_")


def spawn(program: Literal["worker", "aside"], *arguments: str) -> tuple[int, socket.socket]:
    """Start one of the two programs beside the server; returns its id and our end of the socket.

    It gets what is named here and no more. (multiprocessing's spawn hands on the whole environment.)
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
            pid = os.posix_spawn(sys.executable, command, environment)
        except BaseException:
            ours.close()
            raise
    ours.setblocking(False)
    return pid, ours


async def end(pid: int, patience: float) -> int:
    """Wait for a process that should end by itself, and end it if it does not; returns its exit code."""
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
    except asyncio.CancelledError:  # the server ends meanwhile, and leaves nothing behind
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
