"""The documentation as a site: every page has a place in the menu, and links lead where they led."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import make_site

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SETTINGS = tomllib.loads((make_site.ROOT / "zensical.toml").read_text())["project"]


def menu(part: list[dict[str, object]]) -> list[str]:
    """The pages of a menu, in order."""
    found: list[str] = []
    for entry in part:
        for target in entry.values():
            found += menu(target) if isinstance(target, list) else [str(target)]
    return found


def test_every_page_is_in_the_menu_once() -> None:
    pages = {str(make_site.destination(p)) for p in make_site.sources() if p.suffix == ".md"} | {"api.md"}
    listed = menu(SETTINGS["nav"])
    assert sorted(listed) == sorted(pages)


def test_links_of_the_site_lead_to_its_pages(tmp_path: Path) -> None:
    make_site.stage(tmp_path)
    links = 0
    for page in tmp_path.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.relative_to(tmp_path)} links to {target}"
            links += 1
    assert links > 100


def test_a_link_to_a_source_keeps_its_words() -> None:
    known = {Path("docs/quickstart.md"), Path("README.md")}
    text = "See [the recipe](../recipes/x.toml), [start](quickstart.md#set-up), [first](../README.md), [web](https://a.b/c)."
    said = "See the recipe, [start](quickstart.md#set-up), [first](index.md), [web](https://a.b/c)."
    assert make_site.moved(Path("docs/concepts.md"), text, known) == said


def test_the_api_page_has_every_public_name() -> None:
    import sameseed

    names = re.findall(r"^::: [\w.]+\.(\w+)$", make_site.api(), re.MULTILINE)
    assert sorted([*names, "__version__"]) == sorted(sameseed.__all__)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pages = tmp_path / SETTINGS["docs_dir"]
    make_site.stage(pages)
    (tmp_path / "zensical.toml").write_text((make_site.ROOT / "zensical.toml").read_text())
    (tmp_path / "sameseed").symlink_to(make_site.ROOT / "sameseed")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / SETTINGS["site_dir"] / "api" / "index.html").read_text()
    assert "sameseed.engine.llm.LLM" in api
