"""Collects the documentation pages for the site; `make docs-site` builds it, with links and anchors checked.

Pages are in the repository beside the code that they describe. The site needs them in one folder. They are copied
there, README.md as the first page, and their links are adapted. A link to a file that is no page becomes plain text.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = {Path("README.md"): Path("index.md")}
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/peers/README.md", "csrc/README.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
API = """# Python API

What `from sameseed import ...` gives, from the docstrings. Everything else may change without notice.

"""


def destination(page: Path) -> Path:
    """The path of a repository page in the site; both paths are relative."""
    if page in FIRST:
        return FIRST[page]
    return page.relative_to("docs") if page.parts[0] == "docs" else page


def sources() -> list[Path]:
    """All pages and other files of the site, relative to the repository."""
    inside = [p for kind in ("md", "html", "png", "svg", "json") for p in sorted((ROOT / "docs").rglob(f"*.{kind}"))]
    return [*FIRST, *map(Path, BESIDE), *(p.relative_to(ROOT) for p in inside)]


def moved(page: Path, text: str, known: set[Path]) -> str:
    """A page's text with its links adapted to the site. `known`: the pages and files of the site."""

    def link(match: re.Match[str]) -> str:
        picture, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        there = Path(os.path.normpath(page.parent / target))
        if there not in known:
            return words
        way = os.path.relpath(destination(there), destination(page).parent)
        return f"{picture}[{words}]({way}{anchor})"

    return LINK.sub(link, text)


def api() -> str:
    """The page of the Python API, with one entry for each public name of the package."""
    tree = ast.parse((ROOT / "sameseed" / "__init__.py").read_text())
    given = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    homes = ast.literal_eval(given["_HOMES"])
    return API + "".join(f"::: {home}.{name}\n\n" for name, home in homes.items())


def stage(folder: Path) -> None:
    """Write the site's pages and files into an empty `folder`."""
    known = set(sources())
    for page in known:
        path = folder / destination(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix == ".md":
            path.write_text(moved(page, (ROOT / page).read_text(), known))
        else:
            shutil.copyfile(ROOT / page, path)
    (folder / "api.md").write_text(api())


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    stage(target)
