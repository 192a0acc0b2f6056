"""Triton's interpreter, which runs kernels on the CPU: known before Triton itself is imported, which may be missing."""

from __future__ import annotations

import os


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU (TRITON_INTERPRET=1 before the first import): for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
