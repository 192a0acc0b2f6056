"""Shelves: a folder of modules, one entry a file. The file name is the key, and a file is loaded on first use."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType

from sameseed.errors import RegistryError


@cache
def names(shelf: str) -> tuple[str, ...]:
    """Names of the entries on a shelf (`"drafters"`, `"formats"`, ...), sorted; nothing is imported."""
    folder = Path(__file__).parent / shelf
    found = (m.name for m in pkgutil.iter_modules([str(folder)]))
    return tuple(sorted(n for n in found if not n.startswith("_")))


@cache
def load(shelf: str, name: str) -> ModuleType:
    """The module of one entry. Raises RegistryError that suggests the nearest name."""
    known = names(shelf)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RegistryError(f"no entry {name!r} in {shelf}{hint} (there are: {', '.join(known)})")
    return importlib.import_module(f"sameseed.{shelf}.{name}")
