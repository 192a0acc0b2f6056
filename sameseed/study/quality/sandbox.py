"""Run generated code in a process of its own with hard limits: a guard against accidents, not against an attacker.

The process has a fresh temporary folder, an empty environment, the standard library only, limits of time, processor
time, address space, size of each file (not of all together), open files and processes, and no network (a namespace of
its own where the system allows one). An audit hook refuses processes, threads, sockets, signals, databases, and
reading, writing and listing files outside its folder and Python's own; it does not hide whether a file exists elsewhere
(`os.stat`). It is the leader of a session that is killed as a group. Code of a model that may be hostile belongs into a
container or a virtual machine all the same.
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
from dataclasses import dataclass
from pathlib import Path

from sameseed.errors import ConfigError

GUARD = Path(__file__).with_name("_guard.py")


RLIMITS = {  # besides the processor's seconds; bytes
    "AS": 512 << 20,
    "DATA": 512 << 20,
    "FSIZE": 4 << 20,
    "NOFILE": 32,
    "NPROC": 0,  # no process or thread may be added to the one that runs (the superuser's are not counted)
    "CORE": 0,
    "MEMLOCK": 0,
    "MSGQUEUE": 0,
}


@dataclass(frozen=True)
class SandboxOutcome:
    """Did the program run to its end without an error? If not, why not, in a line."""

    passed: bool
    error: str | None = None


def run(program: str, seconds: float = 10.0) -> SandboxOutcome:
    """Run a Python program for at most `seconds` of wall and of processor time.

    Raises ConfigError where the system has no such limits.
    """
    if os.name != "posix":
        raise ConfigError("generated code runs only where processes can be limited (Linux, macOS); use one of these")
    token, answer = secrets.token_hex(16), b""
    reading, writing = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="sameseed-", ignore_cleanup_errors=True) as folder:
            Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
            job = {"pipe": writing, "token": token, "limits": {**RLIMITS, "CPU": math.ceil(seconds)}}
            ended = _start(folder, writing, json.dumps(job), seconds)
        os.set_blocking(reading, False)  # what the program left behind may hold the other end
        with suppress(BlockingIOError):
            answer = os.read(reading, 1 << 16)
    finally:
        os.close(reading)
        os.close(writing)
    said, _, error = answer.partition(b"\n")  # anything may have been written there
    if said == token.encode():
        return SandboxOutcome(not error, error.decode(errors="replace") or None)
    return SandboxOutcome(False, ended)


def _start(folder: str, pipe: int, job: str, seconds: float) -> str:
    """Run the guard; returns how it ended, in words."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(GUARD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(pipe,),
        cwd=folder,
        env={"HOME": folder, "TMPDIR": folder, "PATH": "", "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    try:
        with suppress(BrokenPipeError):
            process.communicate(f"{job}\n".encode(), timeout=seconds)
        code = process.wait(timeout=seconds)
        return f"ended by signal {-code}" if code < 0 else f"left with exit code {code}"
    except subprocess.TimeoutExpired:
        return f"no end after {seconds:g} s"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(programs: Iterable[str], tick: Callable[[], None] = lambda: None) -> list[SandboxOutcome]:
    """Run several programs, as many at once as there are processors; outcomes in order."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    outcomes = []
    pool = ThreadPoolExecutor(cores)
    try:
        for outcome in pool.map(run, programs):
            outcomes.append(outcome)
            tick()
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, only what runs already is waited for
    return outcomes
