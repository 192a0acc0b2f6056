"""The pages are true: generated tables are current, links lead somewhere, commands exist, examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import make_tables
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_from_the_code_are_current(page: Path) -> None:
    # Tables of records are left out: a user who runs `make bench` has not broken the docs.
    text = page.read_text()
    for match in make_tables.MARKED.finditer(text):
        kind, name = match[2], match[3]
        if kind not in ("table", "picture", "study"):
            assert make_tables.MAKERS[kind](name) in match[0], f"{page.name}: {kind}:{name} is stale; run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|mailto:)([^)#\s]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_headings_find_them(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert anchor in anchors(there), f"{page.name} links to #{anchor}, which {there.name} has not"


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_python_of_a_page_runs(page: str) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    code = code.replace('"smollm2"', '"embedded"')  # nothing is downloaded here
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
