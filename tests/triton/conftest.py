"""Cases for Triton's interpreter, which must be chosen before Triton is imported: tests/unit/ops/test_triton.py runs
them in a process of their own. By hand: TRITON_INTERPRET=1 python -m pytest tests/triton
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def _no_kernel_falls_back() -> Iterator[None]:
    """A kernel that fails would be replaced by the reference, and every comparison would hold."""
    from foretoken.ops.triton import guard

    guard.broken.clear()
    yield
    assert not guard.broken
