"""Prints how many lines each room of the house has beside its budget in house.toml; fails where one is above it.

A room is a folder of the package; `leaves` are the package's own files. All lines of tracked Python files count.
`--lower` writes today's figures where they are below the budget: budgets only fall.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "house.toml"


def counted() -> dict[str, Counter[str]]:
    """Lines by part of the house ("package", "tests", a companion) and room."""
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, Counter[str]] = {"package": Counter(), "companions": Counter(), "tests": Counter()}
    for name in filter(None, names.split("\n")):
        lines = len((ROOT / name).read_bytes().splitlines())
        part, *rest = name.split("/")
        if part == "sameseed":
            found["package"][rest[0] if len(rest) > 1 else "leaves"] += lines
        elif part == "packages":
            found["tests" if "tests" in rest else "companions"][rest[0]] += lines
        elif part in ("tests", "conftest.py"):
            found["tests"]["tests"] += lines
    return found


def main(lower: bool) -> int:
    """Print the table, and with `lower` write lower budgets; 1 if a room is above its budget."""
    text, above = HOUSE.read_text(), []
    budgets = tomllib.loads(text)
    for part, rooms in counted().items():
        for room, lines in sorted(rooms.items(), key=lambda item: -item[1]):
            budget = budgets.get(part, {}).get(room, 0)
            print(f"{part:<11}{room:<12}{lines:>7,}{budget:>8,}{'  above its budget' if lines > budget else ''}")
            above += [room] if lines > budget else []
            budgets[part][room] = min(budget, lines)
        print(f"{part:<23}{sum(rooms.values()):>7,}{sum(budgets.get(part, {}).values()):>8,}\n")
    if lower:
        parts = (f"\n[{part}]\n" + "".join(f"{k} = {v}\n" for k, v in rooms.items()) for part, rooms in budgets.items())
        HOUSE.write_text(text[: text.index("\n[")] + "".join(parts))
    if above:
        print(f"Above their budget: {', '.join(above)}. Who adds makes room: see house.toml", file=sys.stderr)
    return bool(above)


if __name__ == "__main__":
    sys.exit(main("--lower" in sys.argv[1:]))
