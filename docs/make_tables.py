"""Writes the generated tables of README.md and docs/ from the measured records, the registries and the flags.

A table stands between two markers, and the text between them is replaced:

    <!-- table:summary -->    a table of records; recorded.py has one function for each
    <!-- picture:speed -->    a picture of records in docs/pictures; pictures.py has one function for each
    <!-- study:assisted -->   what a published study found here, from studies/assisted.jsonl
    <!-- servers:promises -->   which promises servers kept, from promises.jsonl; `families`: by model and draft
    <!-- registry:drafters -->   the entries of a registry, with the first sentence of each
    <!-- models:known -->    memory that known models need, from their shapes
    <!-- flags:sampling -->   settings of sampling, or of the engine (flags:engine): defaults and meaning
    <!-- end -->

`python docs/make_tables.py` writes pages and pictures; `--check` only names stale pages (exit code 1).
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pictures import FOLDER, picture
from promised import promises
from recorded import ROOT, markdown, table
from studied import section

from sameseed import registry
from sameseed.cli import options
from sameseed.plan.paper import sheet
from sameseed.request import SamplingParams

MARKED = re.compile(
    r"(<!-- (table|picture|study|servers|registry|flags|models):(\w+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def entries(name: str) -> str:
    """Name and first docstring paragraph (less the name) of a registry's entries, which are parsed, not imported."""
    rows = []
    for entry in registry.names(name):
        folder = ROOT / "sameseed" / name / entry
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        text = re.sub(r"^(Format \S+:|\S+ drafter:?) ", "", text.split("\n\n")[0].replace("\n", " "))
        rows.append([f"`{entry}`", re.sub(r"^(\(.*?\)): (.*?)\.?$", r"\2 \1", text).removesuffix(".")])
    return markdown(["name", "what it is"], rows)


def flags(name: str) -> str:
    """Table of the settings of one kind. A name is a keyword in Python and, with dashes, a command-line flag."""
    if name == "sampling":
        rows = [(f.name, default(f), f.metadata["help"]) for f in dataclasses.fields(SamplingParams)]
    else:
        rows = [(f.name, default(f), f.type.__metadata__[0].help) for f in dataclasses.fields(options.engine_flags({}))]
    return markdown(["name", "default", "meaning"], [[f"`{name}`", value, text] for name, value, text in rows])


def default(field: dataclasses.Field[Any]) -> str:
    """The default of a field as Python source; "" if nothing is set."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return "" if value in (None, (), {}, "{}", "") else f"`{value!r}`"


READ = 50e9  # bytes per second: memory bandwidth assumed for the ceilings in the table of models
HUB = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
}


def models(_: str) -> str:
    """Table of known models: memory by format, KV cache of 1,000 tokens, and the tokens/s possible at `READ`."""
    rows = []
    for shape, hub in HUB.items():
        plain, eight, four = (sheet(shape, format) for format in ("bf16", "w8a8", "w4a8"))
        gib = [f"{s.weights / 2**30:.2f}" for s in (plain, eight, four)]
        rows.append([f"`{hub}`", *gib, f"{1000 * plain.row / 2**30:.3f}", f"{READ / eight.read:.0f}"])
    return markdown(["model", "bf16", "w8a8", "w4a8", "cache of 1,000 tokens", "ceiling in w8a8"], rows)


MAKERS: dict[str, Callable[[str], str]] = {
    "table": table,
    "study": section,
    "servers": promises,
    "registry": entries,
    "flags": flags,
    "models": models,
}


def render(text: str, folder: Path = ROOT, draw: bool = False) -> str:
    """A page with every marked table and picture regenerated. `folder`: where the page is; `draw`: pictures too."""

    def made(match: re.Match[str]) -> str:
        kind, name = match[2], match[3]
        if kind != "picture":
            return f"{match[1]}{MAKERS[kind](name)}\n{match[4]}"
        path = os.path.relpath(FOLDER, folder)
        return f"{match[1]}{picture(name, draw).replace(str(FOLDER), path)}\n{match[4]}"

    return MARKED.sub(made, text)


def main(argv: list[str]) -> int:
    """Write pictures and the stale pages, or with --check only name these pages and return 1 if there are any."""
    check = "--check" in argv
    stale = [
        (page, new) for page in pages() if (new := render(page.read_text(), page.parent, not check)) != page.read_text()
    ]
    for page, new in stale:
        print(f"{'stale:' if check else 'wrote'} {page.relative_to(ROOT)}")
        if not check:
            page.write_text(new)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
