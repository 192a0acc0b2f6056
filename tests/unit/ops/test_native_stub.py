"""The committed stub of the native module equals what nanobind generates from the built module."""

from __future__ import annotations

import ast
from pathlib import Path

import fixtures_cpu  # noqa: F401  (skips without the native module)
import pytest

import sameseed
from sameseed import _native

stubgen = pytest.importorskip("nanobind.stubgen", reason="nanobind writes the stub")


def names(text: str) -> dict[str, str]:
    """Signatures by the name of the function or method."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{x.name}": ast.unparse(x.args) for x in node.body if isinstance(x, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, ast.unparse(node.args))
    return found


def test_the_stub_is_up_to_date():
    """If not: python -m nanobind.stubgen -m sameseed._native -o sameseed/_native.pyi"""
    made = stubgen.StubGen(_native)
    made.put(_native)
    committed = Path(sameseed.__file__).with_name("_native.pyi").read_text()
    assert names(committed) == names(made.get())
