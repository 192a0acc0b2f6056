"""foretoken guesses tokens cheaply, checks them exactly, and counts what that bought."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from foretoken.config import CacheConfig, EngineConfig, SpecConfig
    from foretoken.engine.llm import LLM, AsyncLLM
    from foretoken.formats.scheme import QuantScheme
    from foretoken.request import Completion, SamplingParams

_HOMES = {
    "LLM": "foretoken.engine.llm",
    "AsyncLLM": "foretoken.engine.llm",
    "SamplingParams": "foretoken.request",
    "Completion": "foretoken.request",
    "SpecConfig": "foretoken.config",
    "CacheConfig": "foretoken.config",
    "EngineConfig": "foretoken.config",
    "QuantScheme": "foretoken.formats.scheme",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "Completion",
    "EngineConfig",
    "QuantScheme",
    "SamplingParams",
    "SpecConfig",
    "__version__",
]


def __getattr__(name: str) -> object:
    # Public names load on first use, so that `foretoken --help` does not wait for torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
