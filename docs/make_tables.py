"""Write the generated tables of README.md and docs/: from the measured records, the registries and the flags.

A table stands between two markers, and what lies between them is replaced:

    <!-- table:summary -->    README's: rows of bench.jsonl and headline.jsonl, with prompts, tokens and runs
    <!-- table:bench -->      the newest run in benchmarks/results/bench.jsonl
    <!-- table:eval -->       the newest comparison of formats in benchmarks/results/eval.jsonl
    <!-- table:quantize -->   the newest record of every method and format in quantize.jsonl
    <!-- table:gguf -->       the newest comparison with llama.cpp's logits of every file in gguf.jsonl
    <!-- table:certificates -->   the newest certificate of each configuration and checks, from certificates.jsonl
    <!-- table:policies -->   the newest comparison of length policies, from policies.jsonl
    <!-- table:headline -->   the newest measurement of each title, from headline.jsonl
    <!-- table:load -->       speculation on against off by concurrency, the newest of each cell, from load.jsonl
    <!-- table:server -->     what the server costs and saves: overhead, prefix, grammar and soak .jsonl
    <!-- table:gpu -->        the newest run of benchmarks/gpu.py on a GPU: aims and what was found, from gpu.jsonl
    <!-- table:peers -->      the newest comparison with other engines of each shape, from peers.jsonl
    <!-- registry:drafters -->   the entries of a registry and the first sentence of each
    <!-- flags:sampling -->   the settings of sampling, or of the engine (flags:engine): defaults and meaning
    <!-- end -->

`python docs/make_tables.py` writes, `--check` only names the stale pages (exit code 1).
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recorded import ROOT, markdown, table

from sameseed import registry
from sameseed.cli import options
from sameseed.request import SamplingParams

MARKED = re.compile(r"(<!-- (table|registry|flags):(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def entries(name: str) -> str:
    """Name and first sentence of each entry of a registry; entries are read, not imported."""
    rows = []
    for entry in registry.names(name):
        folder = ROOT / "sameseed" / name / entry
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        rows.append([f"`{entry}`", text.split("\n\n")[0].replace("\n", " ")])
    return markdown(["name", "what it is"], rows)


def flags(name: str) -> str:
    """The settings of one kind: keyword in Python and, with dashes, flag on the command line."""
    if name == "sampling":
        fields, notes = dataclasses.fields(SamplingParams), options.SAMPLING_HELP
    else:
        fields, notes = dataclasses.fields(options.engine_flags({})), options.CHOICE_HELP | options.ENGINE_HELP
    return markdown(
        ["name", "default", "meaning"], [[f"`{f.name}`", default(f), notes.get(f.name, "")] for f in fields]
    )


def default(field: dataclasses.Field[Any]) -> str:
    """The default of a field as Python writes it; empty where nothing is set."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return "" if value in (None, (), {}, "{}", "") else f"`{value!r}`"


MAKERS: dict[str, Callable[[str], str]] = {"table": table, "registry": entries, "flags": flags}


def render(text: str) -> str:
    """A page with every marked table made anew."""
    return MARKED.sub(lambda m: f"{m[1]}{MAKERS[m[2]](m[3])}\n{m[4]}", text)


def main(argv: list[str]) -> int:
    """Write the pages, or with --check only compare."""
    check = "--check" in argv
    stale = [(page, new) for page in pages() if (new := render(page.read_text())) != page.read_text()]
    for page, new in stale:
        print(f"{'stale:' if check else 'wrote'} {page.relative_to(ROOT)}")
        if not check:
            page.write_text(new)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
