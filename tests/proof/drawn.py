"""Random mutants: a seeded generator of mistakes in the shipped source, area by area."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import random
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

from proof.edits import edits, silent
from proof.mutant import Mutant, bare

# Areas of the source that are mutated, and the modules of each.
AREAS: Mapping[str, tuple[str, ...]] = {
    "masks and positions": ("batch", "spec.draft"),
    "caches": ("kvcache.blocks", "kvcache.cache", "models.runner"),
    "prefixes": ("kvcache.prefix",),
    "processors": ("spec.sampling",),
    "verification": ("spec.verify", "spec.step", "drafters._choices"),
    "scheduler": ("engine.scheduler", "engine.running", "engine.engine"),
    "ends": ("engine.output", "engine.running"),
    "grammars": ("grammar",),
    "drafters' state": ("drafters._followers", "drafters._shadow", "drafters.draft_model"),
    "operations": ("ops.reference",),
}
# Functions that affect no text: output for people, sizes, time limits, and which level drafted a node.
_NO_TEXT = ("__repr__", "__str__", "num_bytes", "metrics", "_metrics", "__enter__", "__exit__", "node_levels")


@dataclass(frozen=True)
class DrawnMutant:
    """A randomly drawn mutant: its area, its kind of mistake, and the lines of the file that it affects."""

    mutant: Mutant
    area: str
    kind: str
    file: str
    lines: range


@dataclass(frozen=True)
class Site:
    """One node of a function's syntax tree and one edit of it: `index` in `ast.walk` order, `which` of its edits."""

    function: FunctionType
    index: int
    which: int
    kind: str


@dataclass(frozen=True)
class Places:
    """The mutation sites of all areas."""

    areas: Mapping[str, tuple[str, ...]]

    @cached_property
    def sites(self) -> dict[str, list[Site]]:
        """Sites by area."""
        return {area: [s for name in names for s in _sites(name)] for area, names in self.areas.items()}

    @property
    def files(self) -> set[str]:
        """The source files that contain sites."""
        return {s.function.__code__.co_filename for sites in self.sites.values() for s in sites}

    def draw(self, seed: int) -> Iterator[DrawnMutant]:
        """Yield distinct mutants until all sites are used.

        Areas take turns; in an area, a random function is drawn first, then a random site in it.
        """
        rng, seen = random.Random(seed), set[str]()
        left: dict[str, dict[str, list[Site]]] = {area: {} for area in self.sites}  # by area and function
        for area, sites in self.sites.items():
            for site in sites:
                name = f"{site.function.__module__}.{site.function.__qualname__}"
                left[area].setdefault(name, []).append(site)
        while any(left.values()):
            for area, functions in left.items():
                if functions:
                    name = rng.choice(sorted(functions))
                    site = functions[name].pop(rng.randrange(len(functions[name])))
                    if not functions[name]:
                        del functions[name]
                    made = _made(site, area)
                    if made is not None and made.mutant.name not in seen:
                        seen.add(made.mutant.name)
                        yield made


def functions(module: Any) -> Iterator[FunctionType]:
    """Functions and methods written in a module whose code can be replaced: no closures, no cached functions."""
    spaces = [vars(module), *(vars(c) for c in vars(module).values() if inspect.isclass(c))]
    for space in spaces:
        for value in list(space.values()):
            inner = bare(value)
            if hasattr(inner, "cache_clear"):
                continue
            inner = inspect.unwrap(inner) if callable(inner) else inner
            if (
                isinstance(inner, FunctionType)
                and inner.__code__.co_filename == module.__file__
                and not inner.__code__.co_freevars
                and inner.__name__ != "<lambda>"
            ):
                yield inner


def _tree(function: FunctionType) -> ast.FunctionDef:
    """A function's source, parsed; line 1 is its first line, decorators included."""
    found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef))
    return found  # type: ignore[return-value]


def _open(tree: ast.FunctionDef) -> Iterator[tuple[int, ast.AST, bool]]:
    """Yield (index in `ast.walk`, node, early) of nodes that may be mutated.

    `early`: the node is nested in a block, so that a return there leaves before the function's end.
    """
    order = {id(node): i for i, node in enumerate(ast.walk(tree))}
    stack: list[tuple[ast.AST, bool]] = [(s, False) for s in tree.body]
    while stack:
        node, inside = stack.pop()
        if silent(node):
            continue
        yield order[id(node)], node, inside
        deeper = inside or isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try))
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "ctx"):
                values = value if isinstance(value, list) else [value]
                stack += [(v, deeper) for v in values if isinstance(v, ast.AST)]


def _sites(name: str) -> Iterator[Site]:
    for function in functions(importlib.import_module(f"sameseed.{name}")):
        if function.__name__ not in _NO_TEXT:
            for index, node, early in _open(_tree(function)):
                for which, (kind, _) in enumerate(edits(node, early)):
                    yield Site(function, index, which, kind)


def _made(site: Site, area: str) -> DrawnMutant | None:
    """The mutant of a site; None where the compiled code stays the same."""
    tree = _tree(site.function)
    right = textwrap.dedent(inspect.getsource(site.function))
    _, node, early = next(found for found in _open(tree) if found[0] == site.index)
    new = list(edits(copy.deepcopy(node), early))[site.which][1] or ast.Pass()
    text = f"{_short(node)} -> {_short(new)}"
    first = site.function.__code__.co_firstlineno
    lines = _lines(tree, node, first)
    _Replace(node, new).visit(tree)
    place = f"{first + node.lineno - 1}:{node.col_offset}"  # type: ignore[attr-defined]
    where = f"{site.function.__module__}.{site.function.__qualname__}:{place}"
    mutant = Mutant(f"{where} {text}", site.function, right, ast.unparse(ast.fix_missing_locations(tree)))
    same = mutant.code().co_code == site.function.__code__.co_code and "constant" not in site.kind
    return None if same else DrawnMutant(mutant, area, site.kind, site.function.__code__.co_filename, lines)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _lines(tree: ast.AST, node: ast.AST, first: int) -> range:
    """Lines of the file that run if the node runs.

    They are those of the smallest statement around the node, without that statement's body.
    """
    best: ast.AST = node
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and any(n is node for n in ast.walk(statement)):
            best = statement  # ast.walk goes from the outside in, so the last match is the smallest
    body = getattr(best, "body", None)
    end = body[0].lineno - 1 if body else best.end_lineno  # type: ignore[attr-defined]
    start: int = best.lineno  # type: ignore[attr-defined]
    return range(first + start - 1, first + max(end, start))


def _short(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        node = node.test
    return " ".join(ast.unparse(node).split())[:80]
