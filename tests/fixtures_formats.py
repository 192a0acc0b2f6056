"""The format of docs/extend.md, as its page prints it, in the registry."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest

from sameseed import registry
from sameseed.scheme import Format

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extend.md"
CODE = next(c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "\nFORMAT = " in c)
GUIDE = types.ModuleType("ternary")
exec(compile(CODE, str(PAGE), "exec"), GUIDE.__dict__)
FORMAT: Format = GUIDE.FORMAT


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add it to the registry, as an installed package does."""
    names, load = registry.names, registry.load

    def more_names(kind: str) -> Any:
        return (*names(kind), "ternary") if kind == "formats" else names(kind)

    monkeypatch.setattr(registry, "names", more_names)
    monkeypatch.setattr(registry, "load", lambda kind, name: GUIDE if name == "ternary" else load(kind, name))
