"""sameseed: an inference engine that drafts tokens cheaply, verifies them exactly, and measures the speedup."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sameseed.config import CacheConfig as CacheConfig, EngineConfig as EngineConfig, SpecConfig as SpecConfig
    from sameseed.engine.async_llm import AsyncLLM as AsyncLLM
    from sameseed.engine.llm import LLM as LLM
    from sameseed.engine.settings import AsyncEngineArgs as AsyncEngineArgs
    from sameseed.request import Completion as Completion, SamplingParams as SamplingParams
    from sameseed.scheme import QuantScheme as QuantScheme

_HOMES = {
    "LLM": "sameseed.engine.llm",
    "AsyncLLM": "sameseed.engine.async_llm",
    "AsyncEngineArgs": "sameseed.engine.settings",
    "SamplingParams": "sameseed.request",
    "Completion": "sameseed.request",
    "SpecConfig": "sameseed.config",
    "CacheConfig": "sameseed.config",
    "EngineConfig": "sameseed.config",
    "QuantScheme": "sameseed.scheme",
}

_ELSEWHERE = {  # names in other libraries: the names here
    **dict.fromkeys(("Llama", "LLMEngine", "AutoModelForCausalLM", "pipeline"), "LLM"),
    "AsyncLLMEngine": "AsyncLLM",
    "EngineArgs": "AsyncEngineArgs",
    "AutoTokenizer": "LLM(...).tokenizer",
    "GenerationConfig": "SamplingParams",
    "RequestOutput": "Completion",
    "TokensPrompt": '{"prompt_token_ids": [...]}',
    "TextPrompt": '{"prompt": "..."}',
    **dict.fromkeys(("StructuredOutputsParams", "GuidedDecodingParams"), "the server's response_format"),
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    # Public names load on first use, so that `sameseed --help` does not wait for torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ELSEWHERE:  # the text of an AttributeError would be lost in `from sameseed import ...`
        raise ImportError(f"sameseed has no {name!r}; here it is {_ELSEWHERE[name]}")
    from sameseed.errors import nearest

    raise AttributeError(f"module 'sameseed' has no attribute {name!r}{nearest(name, __all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
