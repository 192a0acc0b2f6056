"""Tests of the GPU kernels: on a GPU, or in Triton's interpreter, which must be chosen before Triton is imported.

tests/unit/ops/test_triton.py runs them in separate processes. By hand: TRITON_INTERPRET=1 python -m pytest
tests/triton. With SAMESEED_TEST_GPU=pretended as well, tensors are on the pretended device. Then the host code of
launches, and these tests themselves, fail where they would fail on a GPU.
"""

import os

import fixtures_interpreter
import pytest
import torch
from fixtures_device import interpreted_there, pretended_device

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PRETENDED = os.environ.get("SAMESEED_TEST_GPU") == "pretended"
if INTERPRETED:
    fixtures_interpreter.order_dots()
    fixtures_interpreter.hasten()
asked_for = INTERPRETED or os.environ.get("SAMESEED_TEST_GPU") == "1"
collect_ignore_glob = [] if asked_for else ["test_*.py"]


@pytest.fixture
def small_programs(request, monkeypatch):
    """The interpreter also computes padding, so programs are made as wide as the smallest weights here."""
    from sameseed.ops.triton import tiling

    if INTERPRETED and "as_it_is" not in request.node.name:
        monkeypatch.setattr(tiling, "OUTPUTS", {})
        monkeypatch.setattr(tiling, "WARPS", {})
        monkeypatch.setattr(tiling, "FEWEST", 32)
        monkeypatch.setattr(tiling, "WHOLE_OUTPUTS", 32)
    tiling.cut.cache_clear()  # it caches the cuts of other shapes
    yield
    tiling.cut.cache_clear()


@pytest.fixture(autouse=True)
def _where_the_kernels_run(monkeypatch):
    """Make tensors on the tested device. No kernel may fail: the reference would replace it, and tests would pass."""
    from sameseed.ops.triton import guard

    guard.broken.clear()
    if PRETENDED:
        with pretended_device() as name:
            interpreted_there(monkeypatch)
            torch.set_default_device(name)
            try:
                yield
            finally:
                torch.set_default_device(None)
    else:
        torch.set_default_device("cpu" if INTERPRETED else "cuda")
        yield
        torch.set_default_device("cpu")
    assert not guard.broken
