"""Kernels that begin before those before them have ended: what they do before they wait, in compiled code."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: nothing is compiled")
from sameseed.ops import normed_rows, triton as gpu
from sameseed.ops.triton import dispatch, guard, prepared
from sameseed.scheme import QuantScheme

pytestmark = [pytest.mark.triton, pytest.mark.skipif(guard.interpreted(), reason="the interpreter compiles nothing")]


def launches(name: str) -> list[guard.Launch]:
    w = gpu.pack(QuantScheme.parse(name).encode(torch.ones(128, 2048)))
    rows = normed_rows(torch.empty(3, 2048), torch.ones(2048), 1e-5)
    launch, ready = dispatch.preparation(rows, dispatch.form_for(w), w.group)
    return [launch, *dispatch.multiplication(ready, w, None, torch.empty(3, 128), torch.empty(3, 128))]


@pytest.mark.parametrize("name", ["bf16", "w4a16"])
def test_only_weights_are_asked_for_before_the_wait(name, tmp_path, monkeypatch):
    """A kernel launched early that did not wait would let its successor read what its predecessor has not written."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(prepared, "EARLY", True)
    made = launches(name)
    assert len(made) == 3
    for launch in made:
        assert launch.options["launch_pdl"]
        ptx = launch.compile(90).asm["ptx"]
        before, after = ptx.split("griddepcontrol.wait;")
        assert not re.search(r"\b(ld|st|cp\.async\S*|atom)\.\S*global", before) and "griddepcontrol" not in before
        assert "griddepcontrol.launch_dependents" in after and re.search(r"st\.global", after)
        assert ("prefetch.global.L2" in before) == ("w_ptr" in launch.arguments)
        assert "prefetch" not in after


def test_no_kernel_begins_early_unless_asked():
    assert not any(launch.constants["EARLY"] or "launch_pdl" in launch.options for launch in launches("bf16"))


def test_older_gpus_and_the_interpreter_begin_in_turn(monkeypatch):
    monkeypatch.setattr(prepared, "EARLY", True)
    monkeypatch.setattr(prepared, "capability", lambda device: (8, 9))
    assert not prepared.begins_early(torch.device("cuda"))
    monkeypatch.setattr(prepared, "capability", lambda device: (9, 0))
    assert prepared.begins_early(torch.device("cuda"))
    monkeypatch.setattr(prepared, "interpreted", lambda: True)
    assert not prepared.begins_early(torch.device("cuda"))
