"""The process that runs generated code, as `sandbox.run` starts it: restricts itself, runs the code, reports."""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import runpy
import sys
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
NO_NEW_PRIVILEGES = 38
# Prefixes of audit events that are refused; listing folders is looked at before. An in-memory database is harmless, but
# ATTACH and VACUUM INTO write any file without an audit event.
REFUSED = ["os.", "subprocess.", "pty.", "shutil.", "tempfile.", "socket.", "ctypes.", "sqlite3.", "fcntl."]
REFUSED += ["syslog.", "signal.pthread_kill", "resource.setrlimit", "resource.prlimit"]
# Modules that can write any file, or start a process, without an audit event.
REFUSED_MODULES = {"_posixsubprocess", "_ctypes", "_socket", "_multiprocessing", "_interpreters", "_xxsubinterpreters"}
REFUSED_MODULES |= {"readline", "_gdbm", "_dbm", "_tkinter"}
READABLE = ("/dev/null", "/dev/zero", "/dev/urandom", "/usr/share/zoneinfo", "/etc/localtime")


def isolate() -> None:
    """Give up new privileges, and, if the system allows it, the network and other processes' shared memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC)  # may fail; the hook refuses sockets anyway


def limit(limits: dict[str, int]) -> None:
    """Set hard resource limits, which this process cannot raise again."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            _, most = resource.getrlimit(kind)
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(kind, (value, value))


def watch(folder: str) -> None:
    """Install an audit hook that refuses processes, sockets, signals, databases, and files outside `folder`.

    It holds in all threads, and cannot be removed. In `folder` files can be written, not moved or removed. Python's own
    stay readable. `os.stat` has no audit event, so the program can ask whether a file exists elsewhere.
    """
    library = [os.path.realpath(p) for p in {sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), *READABLE}]
    own = os.path.realpath(folder)
    realpath, fspath, fsdecode, isinstance_, separator = os.path.realpath, os.fspath, os.fsdecode, isinstance, os.sep
    refused = tuple(REFUSED)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def inside(path: Any, roots: list[str]) -> bool:
        if isinstance_(path, int):
            return True  # a file descriptor: opening it was allowed
        full = realpath(fsdecode(fspath(path)))
        return any(full == root or full.startswith(root + separator) for root in roots)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = bool(flags & writing) if isinstance_(flags, int) else bool(set(mode or "") & set("wax+"))
            if not inside(path, [own] if writes else [own, *library]):
                raise PermissionError(f"refused here: {event} {path!r}")
        elif event == "import":
            if args[0] in REFUSED_MODULES:
                raise ImportError(f"refused here: {args[0]}")
        elif event in ("os.listdir", "os.scandir"):
            if not inside("." if args[0] is None else args[0], [own, *library]):
                raise PermissionError(f"refused here: {event} {args[0]!r}")
        elif event.startswith(refused):
            raise PermissionError(f"refused here: {event}")

    sys.addaudithook(hook)


def main() -> None:
    """Run program.py, whose output goes nowhere; write the token, a newline and the error, if any, to stdout."""
    job = json.loads(sys.stdin.readline())
    sys.stdin, output = io.StringIO(""), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    isolate()
    limit(job["limits"])
    watch(os.getcwd())
    for name in REFUSED_MODULES | {"ctypes"}:
        sys.modules.pop(name, None)
    for module in (os, sys.modules[os.name]):  # special files have no audit event
        for name in {"mknod", "mkfifo"} & vars(module).keys():
            delattr(module, name)
    write, leave, error = os.write, os._exit, ""  # saved now: a program may replace them in `os`
    try:
        runpy.run_path("program.py", run_name="program")
    except BaseException as fault:  # SystemExit too: a program that leaves early has not passed its tests
        error = f"{type(fault).__name__}: {fault}"[:400]
    write(output, f"{job['token']}\n{error}".encode("utf-8", "replace"))
    leave(0)  # skips atexit handlers, and ends all threads


if __name__ == "__main__":
    main()
