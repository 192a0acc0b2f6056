"""Builds the wheels and the sdist into dist/, and checks them: what `make wheel` runs, with the tools that it installs.

Zig's clang compiles, against an old glibc (manylinux_2_28) and with its C++ library inside: no container is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK, DIST = ROOT / "build" / "wheel", ROOT / "dist"
GLIBC = "2.28"
STABLE = (3, 12)  # from here on one wheel serves every Python


def run(*command: str, **env: str) -> None:
    """A command of the environment of tools; ends the program where it fails."""
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": paths, **env}).returncode:
        sys.exit(f"wheels: failed: {' '.join(command)}")


def interpreters(names: list[str]) -> list[str]:
    """Paths of those that are here, have headers, and need a wheel of their own."""
    ask = "import os, sys, sysconfig as c; print(sys.version_info[0], sys.version_info[1], sys.executable,"
    ask += "os.path.exists(c.get_path('include') + '/Python.h'))"
    found, stable = [], False
    for name in names:
        try:
            said = subprocess.run([name, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError):
            print(f"wheels: no {name} here", flush=True)
            continue
        serves_later = (int(said[0]), int(said[1])) >= STABLE
        if said[3] != "True":
            print(f"wheels: {name} lacks its headers (python3-dev)", flush=True)
        elif not (serves_later and stable):
            found.append(said[2])
            stable |= serves_later
    return found


def build(python: str) -> None:
    """The wheel of one Python, into dist/."""
    import ziglang

    raw = WORK / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    zig = Path(ziglang.__file__).parent / "zig"
    compiler = {
        "CXX": f"{zig} c++ -target x86_64-linux-gnu.{GLIBC}",
        "CXXFLAGS": "-Wno-unknown-warning-option -include cstdio",  # nanobind forgets it for the stable ABI
        "ZIG_GLOBAL_CACHE_DIR": str(WORK / "cache"),
    }
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    folder = "build-dir=build/wheel/{wheel_tag}"
    run(*pip, "wheel", "-v", ".", "--no-deps", "--config-settings", folder, "--wheel-dir", str(raw), **compiler)
    (wheel,) = raw.glob("*.whl")
    platform = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
    run("auditwheel", "repair", "--plat", platform, "--only-plat", "--wheel-dir", str(DIST), str(wheel))


def main() -> None:
    """Wheels of the Pythons named; the sdist; the companions."""
    shutil.rmtree(DIST, ignore_errors=True)
    pythons = interpreters(sys.argv[1:])
    if not pythons:
        sys.exit("wheels: none of these Pythons is here: " + " ".join(sys.argv[1:]))
    for python in pythons:
        build(python)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", str(DIST), ".")
    for project in sorted(ROOT.glob("packages/*/pyproject.toml")):
        run(sys.executable, "-m", "build", "--wheel", "--outdir", str(DIST), str(project.parent))
    made = sorted(str(path) for path in DIST.iterdir())
    run("twine", "check", "--strict", *made)
    for path in made:
        print(f"{Path(path).stat().st_size / 1e6:8.2f} MB  {os.path.relpath(path, ROOT)}")


if __name__ == "__main__":
    main()
