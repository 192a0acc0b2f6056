"""Registries: a folder of modules, one entry per file. The file's name is the key; a file is loaded on first use.

A file whose name begins with an underscore is not an entry. Installed packages add entries by entry points of the group
`sameseed.<registry>`, each of which names a module.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from sameseed.errors import RegistryError, nearest

log = logging.getLogger("sameseed")
WORDS = {"lengths": "policy", "ops": "backend", "quantize": "method", "studies": "study"}  # for one entry, if odd


@cache
def names(registry: str) -> tuple[str, ...]:
    """The sorted names of a registry's entries; imports nothing. Raises RegistryError if two entries share a name."""
    return tuple(sorted({*_own(registry), *_installed(registry)}))


@cache
def load(registry: str, name: str) -> ModuleType:
    """The module of one entry. Raises RegistryError, which suggests the nearest name."""
    known = names(registry)
    if name not in known:
        there = f"{nearest(name, known)} (there are: {', '.join(known)})"
        raise RegistryError(f"there is no {WORDS.get(registry, registry.removesuffix('s'))} {name!r}{there}")
    if (point := _installed(registry).get(name)) is None:
        return importlib.import_module(f"sameseed.{registry}.{name}")
    try:
        return importlib.import_module(point.value)
    except Exception as error:  # code of another package
        raise RegistryError(f"{_package(point)} gives {registry} {name!r}, which cannot be loaded: {error}") from error


@cache
def loaded(registry: str) -> dict[str, ModuleType]:
    """All loadable entries by name. An entry of another package that cannot be loaded is left out, with a warning."""
    found = dict[str, ModuleType]()
    for name in names(registry):
        try:
            found[name] = load(registry, name)
        except RegistryError as error:
            log.warning("%s; it is left out", error)
    return found


def _own(registry: str) -> set[str]:
    modules = pkgutil.iter_modules([str(Path(__file__).parent / registry)])
    return {m.name for m in modules if not m.name.startswith("_")}


@cache
def _installed(registry: str) -> dict[str, EntryPoint]:
    own, found = _own(registry), dict[str, EntryPoint]()
    for point in entry_points(group=f"sameseed.{registry}"):
        first = found.setdefault(point.name, point)
        if point.name in own or (first.value, _package(first)) != (point.value, _package(point)):
            other = "sameseed itself" if point.name in own else _package(first)
            both = f"{other} and {_package(point)}"
            raise RegistryError(f"two entries of {registry} are named {point.name!r}, of {both}; uninstall one")
    return found


def _package(point: EntryPoint) -> str:
    return f"package {point.dist.name!r}" if point.dist is not None else "a package"
