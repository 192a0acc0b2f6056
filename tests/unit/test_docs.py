"""The pages say what is true: generated tables are current, links lead somewhere, the examples run."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from foretoken.request import SamplingParams, Sequence
from foretoken.spec.drafter import parse_options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def load(path: Path) -> ModuleType:
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_tables = load(ROOT / "docs" / "make_tables.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_from_the_code_are_current(page: Path) -> None:
    # Tables of records are left out: a user who runs `make bench` has not broken the docs.
    text = page.read_text()
    for match in make_tables.MARKED.finditer(text):
        kind, name = match[2], match[3]
        if kind != "table":
            assert make_tables.MAKERS[kind](name) in match[0], f"{page.name}: {kind}:{name} is stale; run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|mailto:)([^)#\s]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_the_drafter_of_the_extension_guide_works(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)[0]
    (tmp_path / "repeat.py").write_text(code)
    drafter_class = load(tmp_path / "repeat.py").DRAFTER
    drafter = drafter_class(parse_options(drafter_class, {"period": 3}))
    seqs = [Sequence(i, tokens, SamplingParams(), 0) for i, tokens in enumerate(([1, 2, 3, 4], [5]))]
    draft = drafter.propose(seqs, [4, 2])
    assert draft.nodes(0) == ([2, 3, 4, 2], [-1, 0, 1, 2])
    assert draft.nodes(1) == ([], [])
