"""The HTML page that certificates and studies share (page.html): one self-contained file with a verdict at its top."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader


def templates(folder: Path, **names: object) -> Environment:
    """Templates that extend page.html (blocks about, body; values title, head, tone). `names`: values for all."""
    loader = FileSystemLoader([folder, Path(__file__).parent])
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    environment.globals.update(names)
    return environment
