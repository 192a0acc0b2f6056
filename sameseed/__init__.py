"""sameseed guesses tokens cheaply, checks them exactly, and counts what that bought."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sameseed.config import CacheConfig, EngineConfig, SpecConfig
    from sameseed.engine.llm import LLM, AsyncLLM
    from sameseed.request import Completion, SamplingParams
    from sameseed.scheme import QuantScheme

_HOMES = {
    "LLM": "sameseed.engine.llm",
    "AsyncLLM": "sameseed.engine.llm",
    "SamplingParams": "sameseed.request",
    "Completion": "sameseed.request",
    "SpecConfig": "sameseed.config",
    "CacheConfig": "sameseed.config",
    "EngineConfig": "sameseed.config",
    "QuantScheme": "sameseed.scheme",
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
    # Public names load on first use, so that `sameseed --help` does not wait for torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'sameseed' has no attribute {name!r}")
