"""Write the generated tables of README.md and docs/: from the measured records, the shelves and the settings' fields.

A table stands between two markers, and what lies between them is replaced:

    <!-- table:bench -->             records of benchmarks/results/bench.jsonl, the newest run of each machine
    <!-- shelf:drafters -->          the entries of a shelf and the first sentence of each
    <!-- fields:config:SpecConfig -->  the fields of a dataclass, defaults and comments
    <!-- end -->

`python docs/make_tables.py` writes, `--check` only says which pages are stale (exit code 1).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from foretoken import registry

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- (table|shelf|fields):([\w.:]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shelf(name: str) -> str:
    """Name and first sentence of each entry on a shelf; entries are read, not imported."""
    rows = []
    for entry in registry.names(name):
        text = ast.get_docstring(ast.parse((ROOT / "foretoken" / name / f"{entry}.py").read_text())) or ""
        rows.append([f"`{entry}`", sentence(text)])
    return markdown(["name", "what it is"], rows)


def sentence(text: str) -> str:
    """The first sentence of a docstring on one line."""
    return re.split(r"(?<=[a-z0-9)`\"]{2}\.)\s", " ".join(text.split()), maxsplit=1)[0]


def fields(path: str) -> str:
    """Fields of a dataclass, `module:Class`: default and the comment beside it."""
    module, _, name = path.rpartition(":")
    cls = getattr(importlib.import_module(f"foretoken.{module}"), name)
    notes = dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.*)$", inspect.getsource(cls), re.MULTILINE))
    rows = [[f"`{f.name}`", f"`{default(f)}`", notes.get(f.name, "")] for f in dataclasses.fields(cls)]
    return markdown(["field", "default", "note"], rows)


def default(field: dataclasses.Field[object]) -> str:
    """The default of a field as Python writes it."""
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return f"{type(made).__name__}()" if dataclasses.is_dataclass(made) else repr(made)
    return "required"


def records(name: str) -> list[dict[str, object]]:
    """The newest run of a record file, one dict a line."""
    path = RECORDS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def table(name: str) -> str:
    """The measured records of one file."""
    found = records(name)
    if not found:
        return "*No record yet: `make bench` writes one.*"
    raise NotImplementedError


MAKERS = {"table": table, "shelf": shelf, "fields": fields}


def render(text: str) -> str:
    """A page with every marked table made anew."""
    return MARKED.sub(lambda m: f"{m[1]}{MAKERS[m[2]](m[3])}\n{m[4]}", text)


def main() -> int:
    """Write the pages, or with --check only compare."""
    stale = [page for page in pages() if render(page.read_text()) != page.read_text()]
    for page in stale:
        print(("stale: " if "--check" in sys.argv else "wrote ") + str(page.relative_to(ROOT)))
        if "--check" not in sys.argv:
            page.write_text(render(page.read_text()))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
