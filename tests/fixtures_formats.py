"""The format of docs/extend.md, as its page prints it: as a module, and as an installed package."""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sameseed import registry
from sameseed.scheme import Format

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extend.md"
CODE = next(c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "\nFORMAT = " in c)
GUIDE = types.ModuleType("ternary")
exec(compile(CODE, str(PAGE), "exec"), GUIDE.__dict__)
FORMAT: Format = GUIDE.FORMAT
ENTRY = "[sameseed.formats]\nternary = guide_formats.ternary\n"


def write_package(folder: Path) -> None:
    """A package `guide_formats` as pip installs it, to be found where `folder` is on the path."""
    (folder / "guide_formats").mkdir()
    (folder / "guide_formats" / "__init__.py").touch()
    (folder / "guide_formats" / "ternary.py").write_text(CODE)
    info = folder / "guide_formats-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guide-formats\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY)


def forget() -> None:
    """What the registry found so far."""
    for cached in (registry.names, registry.load, registry._installed):
        cached.cache_clear()


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """The package in `folder`, for as long as the context lasts."""
    write_package(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        forget()
        yield
    forget()
