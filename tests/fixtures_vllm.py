"""Which vLLM tests may use: SAMESEED_VLLM_PYTHON, one or more pythons with ":" between, or this one."""

from __future__ import annotations

import importlib.util
import os
import sys


def real_pythons() -> list[str]:
    """Pythons that have vLLM."""
    named = [python for python in os.environ.get("SAMESEED_VLLM_PYTHON", "").split(os.pathsep) if python]
    return named or ([sys.executable] if importlib.util.find_spec("vllm") else [])
