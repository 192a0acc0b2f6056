"""The format of docs/extend.md, as a module and as an installed package; checkpoints of one weight in any format."""

import importlib
import json
import re
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
from fixtures_layouts import RAW
from safetensors.torch import save_file

from sameseed import registry, scheme
from sameseed.models.checkpoint import Checkpoint
from sameseed.models.config import parse_config
from sameseed.models.layouts import sameseed as own
from sameseed.models.save import method_for

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extend.md"
CODE = next(c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "\nFORMAT = " in c)
GUIDE = types.ModuleType("ternary")
exec(compile(CODE, str(PAGE), "exec"), GUIDE.__dict__)
FORMAT = GUIDE.FORMAT
ENTRY = "[sameseed.formats]\nternary = guide_formats.ternary\n"


def write_package(folder):
    """Write a package `guide_formats` as pip would install it; it is found if `folder` is on the path."""
    (folder / "guide_formats").mkdir()
    (folder / "guide_formats" / "__init__.py").touch()
    (folder / "guide_formats" / "ternary.py").write_text(CODE)
    info = folder / "guide_formats-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guide-formats\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY)


def forget():
    """Clear the registry's caches."""
    for cached in (registry.names, registry.load, registry.loaded, registry._installed):
        cached.cache_clear()


@contextmanager
def installed(folder):
    """Install the package in `folder` for this context."""
    write_package(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        forget()
        yield
    forget()


def as_stored(q, chosen):
    """Tensors of a weight "x" as a checkpoint stores them, and their quantization_config."""
    if method_for([chosen]) == "sameseed":
        return own.tensors_of("x", q), own.config_of({"x": chosen})
    return scheme.get(q.format).checkpoint("x", q), scheme.get(q.format).config(q)


def write_weight(folder, tensors, config):
    """Write a checkpoint of one weight, "x"."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {**config, "ignore": []}}))


def read_weight(folder, shape):
    """Read the weight as a model's loader reads it."""
    with Checkpoint(folder) as files:
        files.check(parse_config(RAW), {"x.weight": shape})
        return files.stored("x.weight")
