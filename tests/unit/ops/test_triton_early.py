"""Kernels that start before their predecessors have ended: what compiled code does before it waits."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: nothing is compiled")
from fixtures_ops import Part, make_pass

from sameseed.ops import normed_rows, triton as gpu
from sameseed.ops.triton import dispatch, guard, kv
from sameseed.ops.triton.attention import launches as attending
from sameseed.scheme import QuantScheme

pytestmark = [pytest.mark.triton, pytest.mark.skipif(guard.interpreted(), reason="the interpreter compiles nothing")]


GLOBAL = re.compile(r"\b(ld|st|cp\.async\S*|atom)\.\S*global")


def launches(name: str, num_rows: int = 3) -> list[guard.Launch]:
    w = gpu.pack(QuantScheme.parse(name).encode(torch.ones(128, 2048)))
    rows = normed_rows(torch.empty(num_rows, 2048), torch.ones(2048), 1e-5)
    launch, ready = dispatch.preparation(rows, dispatch.form_for(w), w.group)
    return [launch, *dispatch.multiplication(ready, w, None, torch.empty(num_rows, 128), torch.empty(num_rows, 128))]


def of_attention() -> list[guard.Launch]:
    p = make_pass([Part(300, 1), Part(20, 2, [-1, 0, 0])], "bf16", dim=64, block_size=16)
    rotating = kv.rotating(p.q, p.q[:, :2], p.q[:, :2], p.layer, p.batch, torch.empty(512, 64))[0]
    return [rotating, *attending(p.q, p.layer, p.batch, 0.1, None, torch.empty_like(p.q), "span")]


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return lambda launch: launch.compile(90).asm["ptx"].split("griddepcontrol.wait;")


@pytest.mark.parametrize("name", ["bf16", "w4a16"])
def test_nothing_is_read_before_the_wait(name, compiled):
    """A kernel launched early that did not wait would let its successor read what its predecessor has not written."""
    made = launches(name)
    assert len(made) == 3
    for launch in made:
        assert launch.options["launch_pdl"]
        before, after = compiled(launch)
        assert not GLOBAL.search(before) and "griddepcontrol" not in before
        assert "griddepcontrol.launch_dependents" in after and re.search(r"st\.global", after)


def test_attention_reads_the_batch_alone_before_the_wait(compiled):
    """The batch was written before the pass began, so reading it needs no wait.

    Every program waits, also one without rows: otherwise a kernel might end before its predecessor.
    """
    attend = of_attention()[1]
    for launch in of_attention():
        assert launch.options["launch_pdl"]
        before, *after = compiled(launch)
        assert not re.search(r"\b(st|cp\.async\S*|atom)\.\S*global", before) and "griddepcontrol" not in before
        assert len(after) == (2 if launch.kernel is attend.kernel else 1)
        assert all("griddepcontrol.launch_dependents" in part for part in after)
