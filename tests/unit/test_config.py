"""Settings out of range are refused, and the error says which values are allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sameseed.config import CacheConfig, EngineConfig, SpecConfig, parse_options
from sameseed.errors import ConfigError

BAD: list[tuple[type, dict[str, Any], str]] = [
    (CacheConfig, {"block_size": 0}, "block_size must lie in 1..1024, got 0"),
    (CacheConfig, {"block_size": 1025}, "got 1025"),
    (CacheConfig, {"num_blocks": 0}, "num_blocks must be at least 1"),
    (SpecConfig, {"num_draft_tokens": -1}, "num_draft_tokens must lie in 0..64, got -1"),
    (SpecConfig, {"num_draft_tokens": 65}, "got 65"),
    (SpecConfig, {"num_draft_tokens": 2.0}, "got 2.0"),
    (SpecConfig, {"num_draft_tokens": True}, "got True"),
    (SpecConfig, {"confidence": -0.1}, "confidence must lie in 0..1"),
    (SpecConfig, {"confidence": math.nan}, "confidence must lie in 0..1"),
    (EngineConfig, {"max_num_rows": 0}, "max_num_rows must be at least 1"),
    (EngineConfig, {"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
    (EngineConfig, {"max_num_rows": 8, "max_num_seqs": 9}, "raise the first or lower the second"),
    (EngineConfig, {"threads": 0}, "threads must be at least 1"),
    (EngineConfig, {"max_model_len": 1}, "max_model_len must be at least 2"),
    (EngineConfig, {"max_model_len": -5}, "max_model_len must be at least 2"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), BAD, ids=[str(s) for _, s, _ in BAD])
def test_out_of_range(kind: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    assert message in str(caught.value)


def test_edges_that_are_fine() -> None:
    CacheConfig(block_size=1, num_blocks=1)
    SpecConfig(num_draft_tokens=0, confidence=0)
    SpecConfig(num_draft_tokens=64, confidence=1.0)
    EngineConfig(max_num_rows=1, max_num_seqs=1, max_model_len=2, threads=1)


def test_options_from_json() -> None:
    assert parse_options('{"max_ngram": 4, "deep": {"a": [1]}}') == {"max_ngram": 4, "deep": {"a": [1]}}
    for text in ("", "{", "max_ngram=4", "{'a': 1}"):
        with pytest.raises(ConfigError, match="no JSON object"):
            parse_options(text)
    for text in ("[1]", "3", "null"):
        with pytest.raises(ConfigError, match="must be a JSON object"):
            parse_options(text)
