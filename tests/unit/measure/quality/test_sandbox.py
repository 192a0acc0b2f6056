import os
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from sameseed.measure.quality.sandbox import run, run_all

SHORT = 1.0  # seconds


def test_the_standard_library_works():
    program = """
import collections, datetime, decimal, hashlib, heapq, itertools, math, random, re, string, typing
assert hashlib.md5(b"Hello world").hexdigest() == "3e25960a79dbc69b674cd4ec67a72c62"
print("prints go nowhere")
with open("note", "w") as file:
    file.write("its folder is its own")
assert open("note").read().startswith("its")
import os
assert sorted(os.listdir()) == ["note", "program.py"] == sorted(e.name for e in os.scandir("."))
import doctest, pdb, cmd, glob, tempfile
assert glob.glob("*.py") == ["program.py"]
"""
    assert run(program) is None


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "exit code 0"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", "MemoryError"),
        ("file = open('big', 'wb')\nwhile True: file.write(bytes(1 << 20))", "File too large"),
        ("files = []\nwhile True: files.append(open('x', 'w'))", "Too many open files"),
    ],
)
def test_failures_have_their_reason(program, error):
    assert error in str(run(program))


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "while True: print('x' * 1000000)",
        "try:\n  while True: pass\nexcept BaseException:\n  while True: pass",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_what_does_not_end_is_ended(program):
    error = str(run(program, SHORT))
    assert "no end after" in error or "signal" in error


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import os\nfor _ in range(9):\n  try: os.fork()\n  except OSError: pass\nraise SystemExit(3)",
        "import subprocess; subprocess.run(['true'])", "import os; os.system('true')",
        "import os; os.execv('/bin/true', ['true'])", "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import multiprocessing as m\np = m.Process(target=print); p.start(); p.join(); assert p.exitcode == 0",
        "import _posixsubprocess", "import ctypes; ctypes.string_at(0)", "import os; os.kill(os.getppid(), 9)",
        "import os; os.killpg(0, 9)", "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')", "import syslog; syslog.syslog('x')",
    ],
)  # fmt: skip
def test_no_processes_signals_or_network(program, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = str(run(program))
    assert "refused here" in error or "SystemExit" in error
    assert alive_in(tmp_path) == []


def alive_in(folder):
    """Folders of processes that run in `folder` or below it (the folder may be deleted)."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            found.append(os.readlink(link))
    return [where for where in found if where.startswith(str(folder))]


def test_threads_end_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("import threading\nwhile True: threading.Thread(target=lambda: exec('while True: pass')).start()", SHORT)
    error = str(run(f"from concurrent.futures import ThreadPoolExecutor as T; T().submit(open, {__file__!r}).result()"))
    assert "refused here: open" in error or "can't start new thread" in error  # the latter: not root
    assert alive_in(tmp_path) == []


def test_files_elsewhere_are_out_of_reach(tmp_path):
    mine, new, own = tmp_path / "mine", str(tmp_path / "new"), str(tmp_path)
    mine.write_text("keep")
    for modules, code in (
        ("os", f"open({str(mine)!r}).read()"),
        ("os", f"open({str(mine)!r}, 'w')"),
        ("os", f"os.open({str(mine)!r}, os.O_RDWR)"),
        ("os", f"os.remove({str(mine)!r})"),
        ("os", f"os.rename({str(mine)!r}, 'stolen')"),
        ("os", f"os.symlink({str(mine)!r}, 'link'); open('link', 'w')"),
        ("os", f"os.listdir({own!r})"),
        ("os", f"os.chdir({own!r}); os.listdir()"),
        ("os", f"list(os.scandir({own!r}))"),
        ("shutil", f"shutil.rmtree({own!r})"),
        ("pathlib", f"pathlib.Path({new!r}).mkdir()"),
        ("sqlite3", f"sqlite3.connect({new!r}).execute('create table t (x)')"),
        ("sqlite3", f"sqlite3.connect(':memory:').execute('attach ? as a', ({new!r},))"),
        *((module, "pass") for module in ("readline", "_dbm", "_gdbm", "_tkinter")),
    ):
        assert "refused here" in str(run(f"import {modules}; {code}")), code
    for module, name in product(("os", "posix"), ("mkfifo", "mknod")):
        assert "no attribute" in str(run(f"import {module}; {module}.{name}({new!r})")), (module, name)
    assert mine.read_text() == "keep" and sorted(os.listdir(tmp_path)) == ["mine"]


def test_the_environment_is_cleared_and_the_folder_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("A_SECRET", "x")
    program = "import os\nassert 'A_SECRET' not in os.environ and os.environ['HOME'] == os.getcwd(), os.environ"
    assert run(f"{program}\nopen('x', 'w').write('x')") is None and list(tmp_path.iterdir()) == []


def test_success_cannot_be_told_from_outside_the_guard():
    write = "for fd in range(3, 32):\n  try: os.write(fd, b'\\n')\n  except OSError: pass\n"
    assert run(f"import os\n{write}os._exit(0)")


def test_limits_hold_for_good():
    assert run("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))")
    assert run("import resource as r; assert r.getrlimit(r.RLIMIT_NPROC) == (0, 0)") is None


def test_many_in_order():
    ticks = []
    errors = run_all([f"assert {i} % 3" for i in range(7)], tick=lambda: ticks.append(None))
    assert [error is None for error in errors] == [bool(i % 3) for i in range(7)]
    assert len(ticks) == 7
