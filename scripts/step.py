"""Runs one step of the set-up: all its output goes to a log, what is under way to the terminal.

`python scripts/step.py LOG TITLE COMMAND...` shows pip's downloads and the compiler's files; on failure the log's end.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

DOWNLOADING = re.compile(r"\s*Downloading (\S+?)(?:-py\S+|-cp\S+)? \(([\d.]+) ([kMG])B\)")
PROGRESS = re.compile(r"Progress (\d+) of (\d+)")  # pip --progress-bar raw
COMPILED = re.compile(r"\s*\[(\d+)/(\d+)\] (?:Building|Linking) CXX .*[/ ](\S+)")
MEGABYTES = {"k": 0.001, "M": 1.0, "G": 1000.0}


class Display:
    """What is under way: one line that is written over in a terminal, a line for each larger thing elsewhere."""

    def __init__(self) -> None:
        self.downloaded = 0.0  # MB
        self.doing = ""
        self.terminal = sys.stdout.isatty()

    def read(self, line: str) -> None:
        if match := DOWNLOADING.match(line):
            size = float(match[2]) * MEGABYTES[match[3]]
            self.downloaded += size
            self.doing = f"downloading {match[1].rsplit('/', 1)[-1]} ({size:.1f} MB)"
            self.show(self.doing, lasting=size >= 10)
        elif match := PROGRESS.match(line):
            self.show(f"{self.doing} {100 * int(match[1]) // max(1, int(match[2]))} %")
        elif match := COMPILED.match(line):
            self.show(
                f"compiling {match[1]} of {match[2]}: {match[3].removesuffix('.o')}", lasting=int(match[1]) % 10 == 0
            )
        elif line.startswith("Installing collected packages"):
            self.show("unpacking", lasting=True)

    def show(self, text: str, lasting: bool = False) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 3
            print(f"\r  {text[:width]:<{width}}", end="", flush=True)
        elif lasting:
            print(f"  {text}", flush=True)


def main() -> int:
    """Exit status of the command."""
    log, title, *command = sys.argv[1:]
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    print(f"sameseed: {title}", flush=True)
    display, start = Display(), time.monotonic()
    with (
        open(log, "a", buffering=1, encoding="utf-8") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            display.read(line)
    fetched = f", {display.downloaded:.0f} MB downloaded" if display.downloaded else ""
    took = f"{time.monotonic() - start:.0f} s{fetched}"
    display.show(f"failed after {took}" if process.returncode else took, lasting=True)
    if display.terminal:
        print()
    if process.returncode:
        print("".join(Path(log).read_text(encoding="utf-8").splitlines(keepends=True)[-40:]))
        print(f"sameseed: this step failed; the whole log is {log}")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
