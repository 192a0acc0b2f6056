"""The format of docs/extend.md is a whole one."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from sameseed import ops, registry
from sameseed.scheme import QuantScheme

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "extend.md"


def test_the_format_of_the_guide_works(tmp_path, monkeypatch: pytest.MonkeyPatch):
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1]
    (tmp_path / "ternary.py").write_text(code)
    spec = importlib.util.spec_from_file_location("ternary", tmp_path / "ternary.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ternary", module)
    spec.loader.exec_module(module)
    names, load = registry.names, registry.load
    monkeypatch.setattr(registry, "names", lambda shelf: (*names(shelf), *(["ternary"] if shelf == "formats" else [])))
    monkeypatch.setattr(registry, "load", lambda shelf, name: module if name == "ternary" else load(shelf, name))

    fmt = module.FORMAT
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    q = QuantScheme.parse("ternary-g64").encode(weight)
    assert (q.format, q.group) == ("ternary", 64)
    assert fmt.decode(q).abs().unique().numel() == 1 + q.parts["scales"].unique().numel()
    assert (fmt.decode(q) - weight).square().mean() < 0.4
    assert fmt.decode(fmt.from_checkpoint("x", fmt.checkpoint("x", q))).equal(fmt.decode(q))
    assert fmt.decode(fmt.concat([q, q]))[6:].equal(fmt.decode(q))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    floats = ops.resolve("reference").linear(x, q)
    torch.testing.assert_close(floats, x @ fmt.decode(q).T, rtol=1e-5, atol=1e-4)
    integers = QuantScheme("ternary", activations="int8").encode(weight)
    wanted = x @ fmt.decode(integers).T
    assert (ops.resolve("reference").linear(x, integers) - wanted).abs().max() < 0.02 * wanted.abs().max()
