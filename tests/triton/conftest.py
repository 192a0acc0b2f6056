"""Cases for the GPU's kernels: on a GPU, or in Triton's interpreter, which must be chosen before Triton is imported.

tests/unit/ops/test_triton.py runs them in processes of their own. By hand: TRITON_INTERPRET=1 python -m pytest
tests/triton
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
asked_for = INTERPRETED or os.environ.get("FORETOKEN_TEST_GPU") == "1"
collect_ignore_glob = [] if asked_for else ["test_*.py"]


@pytest.fixture(autouse=True)
def _where_the_kernels_run() -> Iterator[None]:
    """Tensors are made there. A kernel that fails would be replaced by the reference, and every comparison hold."""
    from foretoken.ops.triton import guard

    guard.broken.clear()
    torch.set_default_device("cpu" if INTERPRETED else "cuda")
    yield
    torch.set_default_device("cpu")
    assert not guard.broken
