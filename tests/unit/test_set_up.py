"""The set-up shows its progress, keeps the rest in its log, and passes failures on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAID = """Collecting torch
  Downloading torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (183.1 MB)
Progress 65536 of 183100000
  Downloading http://files/click-8.5.1-py3-none-any.whl (900 kB)
  [20/43] Building CXX object CMakeFiles/kernels.dir/csrc/pool.cpp.o
  [21/43] Building CXX object CMakeFiles/kernels.dir/csrc/ops.cpp.o
"""


def step(log: Path, code: int) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        f"import sys; print({SAID!r}); print('no such thing', file=sys.stderr); sys.exit({code})",
    ]
    script = [sys.executable, str(ROOT / "scripts" / "step.py")]
    return subprocess.run([*script, str(log), "a step", *command], capture_output=True, text=True)


def test_a_step_shows_downloads_and_what_is_compiled(tmp_path: Path) -> None:
    ran = step(tmp_path / "logs" / "log", 0)
    assert ran.returncode == 0 and ran.stderr == ""
    title, torch, compiled, took = ran.stdout.splitlines()
    assert (title, torch, compiled) == (
        "sameseed: a step",
        "  downloading torch-2.13.0+cpu (183.1 MB)",
        "  compiling 20 of 43: pool.cpp",
    )
    assert took.endswith(" s, 184 MB downloaded")
    assert SAID in (tmp_path / "logs" / "log").read_text()


def test_a_step_that_fails_shows_why_and_where_the_log_is(tmp_path: Path) -> None:
    ran = step(tmp_path / "log", 3)
    assert ran.returncode == 3
    assert "no such thing" in ran.stdout and str(tmp_path / "log") in ran.stdout
