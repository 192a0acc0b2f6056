"""The pages are true: generated tables are current, and links lead somewhere."""

import re
from pathlib import Path

import make_tables
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_from_the_code_are_current(page):
    # Tables of records are left out: a user who runs `make bench` has not broken the docs.
    text = page.read_text()
    for match in make_tables.MARKED.finditer(text):
        kind, name = match[2], match[3]
        if kind not in ("table", "picture", "study"):
            assert make_tables.MAKERS[kind](name) in match[0], f"{page.name}: {kind}:{name} is stale; run `make docs`"


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\((?!https?://|mailto:)([^)#\s]*)#?([^)\s]*)", page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(there), f"{page.name} links to #{anchor}, which {there.name} has not"
