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


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use: seconds of wall and of processor time, bytes of memory and of a file."""

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory: int = 512 << 20
    file_size: int = 4 << 20
    open_files: int = 32

    def as_rlimits(self) -> dict[str, int]:
        """For setrlimit. No process or thread may be added to the one that runs (the superuser's are not counted)."""
        return {
            "CPU": self.cpu_seconds,
            "AS": self.memory,
            "DATA": self.memory,
            "FSIZE": self.file_size,
            "NOFILE": self.open_files,
            "NPROC": 0,
            "CORE": 0,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
        }


@dataclass(frozen=True)
class SandboxOutcome:
    """Did the program run to its end without an error? If not, why not, in a line."""

    passed: bool
    error: str | None = None


def run(program: str, limits: SandboxLimits | None = None) -> SandboxOutcome:
    """Run a Python program to its end within `limits`. Raises ConfigError where the system has no such limits."""
    if os.name != "posix":
        raise ConfigError("generated code runs only where processes can be limited (Linux, macOS); use one of these")
    limits = limits or SandboxLimits()
    token = secrets.token_hex(16)
    reading, writing = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="sameseed-", ignore_cleanup_errors=True) as folder:
            Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
            job = {"pipe": writing, "token": token, "limits": limits.as_rlimits()}
            ended = _start(folder, writing, json.dumps(job), limits.seconds)
        os.set_blocking(reading, False)  # what the program left behind may hold the other end
        with suppress(BlockingIOError):
            return _outcome(os.read(reading, 1 << 16), token, ended)
        return _outcome(b"", token, ended)
    finally:
        os.close(reading)
        os.close(writing)


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


def _outcome(answer: bytes, token: str, ended: str) -> SandboxOutcome:
    try:
        told = json.loads(answer)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return SandboxOutcome(False, ended)
    if not isinstance(told, dict) or told.get("token") != token:
        return SandboxOutcome(False, ended)
    error = told.get("error")
    return SandboxOutcome(error is None, error)


def run_all(
    programs: Iterable[str], limits: SandboxLimits | None = None, tick: Callable[[], None] = lambda: None
) -> list[SandboxOutcome]:
    """Run several programs, as many at once as there are processors; outcomes in order."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    outcomes = []
    pool = ThreadPoolExecutor(cores)
    try:
        for outcome in pool.map(lambda p: run(p, limits), programs):
            outcomes.append(outcome)
            tick()
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, only what runs already is waited for
    return outcomes
