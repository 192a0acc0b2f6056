"""Run generated code in its own process with hard limits: a guard against accidents, not against an attacker.

The process has a fresh temporary folder, a minimal environment, only the standard library, and limits of time, memory,
size of each file (not of all files together), open files and processes. It has no network (its own namespace, if the
system allows one). An audit hook (`_guard.py`) refuses processes, sockets, signals, databases, and files outside its
folder and Python's own. The process leads its own session, which is killed as a group. Code from a possibly hostile
model still belongs in a container or a virtual machine.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from sameseed.errors import ConfigError

GUARD = Path(__file__).with_name("_guard.py")
# Limits besides CPU seconds, sizes in bytes. NPROC: no further process or thread (not enforced for root).
RLIMITS = {"AS": 512 << 20, "DATA": 512 << 20, "FSIZE": 4 << 20, "NOFILE": 32, "NPROC": 0}
RLIMITS |= dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE"), 0)


def run(program: str, seconds: float = 10.0) -> str | None:
    """The error of a program, or None. `seconds`: of wall and of CPU time. Raises ConfigError on Windows."""
    if os.name != "posix":
        raise ConfigError("generated code runs only where processes can be limited (Linux, macOS); use one of these")
    token, answer = secrets.token_hex(16), b""
    job = json.dumps({"token": token, "limits": {**RLIMITS, "CPU": math.ceil(seconds)}})
    with tempfile.TemporaryDirectory(prefix="sameseed-", ignore_cleanup_errors=True) as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "PATH": "", "LANG": "C.UTF-8"},
            start_new_session=True,
        ) as process:
            try:
                answer, _ = process.communicate(f"{job}\n".encode(), timeout=seconds)
                code = process.returncode
                ended = f"ended by signal {-code}" if code < 0 else f"left with exit code {code}"
            except subprocess.TimeoutExpired:
                ended = f"no end after {seconds:g} s"
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
    said, _, error = answer.partition(b"\n")  # the program may have written anything: check the token
    if said == token.encode():
        return error.decode(errors="replace") or None
    return ended


def run_all(programs: Iterable[str], tick: Callable[[], None] = lambda: None) -> list[str | None]:
    """The errors of several programs, one per CPU core at a time. `tick` is called after each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    errors = []
    pool = ThreadPoolExecutor(cores)
    try:
        for error in pool.map(run, programs):
            errors.append(error)
            tick()
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, wait only for programs that already run
    return errors
