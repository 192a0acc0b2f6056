"""The budgets of the GPU's kernels, for one chip and a few formats; benchmarks/gpu_static.py has all of them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing is compiled")
import gpu_static

from sameseed.ops.triton import guard

pytestmark = [pytest.mark.triton, pytest.mark.skipif(guard.interpreted(), reason="the interpreter compiles nothing")]


@pytest.mark.parametrize("capability", [90, *(pytest.param(c, marks=pytest.mark.slow) for c in (80, 89, 100))])
def test_kernels_keep_to_their_budgets(capability, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    formats = ["w4a16"] if capability == 90 else gpu_static.FORMATS.split(",")
    assert gpu_static.check(formats, capability, "w4a16|combine|28672 to half" if capability == 90 else "") == []
    said = capsys.readouterr().out
    assert "mma.sync" in said and ("wgmma" in said) == (capability == 90)


def test_a_kernel_beyond_its_budget_is_named():
    code = gpu_static.Code(registers=255, spills=8, shared=100 << 10, step=1, tensor="")
    faults = code.faults("w4a16, 1 rows", 16, 89)
    assert [fault.split()[0] for fault in faults] == ["8", "255", "102400"]
    assert code.faults("w4a8, 64 rows", 4, 90) == []
