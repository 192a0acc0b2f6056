"""Shapes match the models that they are named after: the published parameter counts are the oracle."""

from __future__ import annotations

import pytest

from sameseed.errors import ConfigError
from sameseed.measure.shapes import NAMES, SHAPES, get_shape, shape_as_dict

PUBLISHED = {  # millions of parameters, as the model cards state them
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "llama-3.1-8b": 8030,
    "llama-3.1-70b": 70554,
    "llama-2-7b": 6738,
    "llama-2-13b": 13016,
    "llama-2-70b": 68977,
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1721,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
    "mistral-7b": 7248,
    "smollm2-135m": 134.5,
    "smollm2-360m": 361.8,
    "tinyllama-1.1b": 1100,
    "qwen3-30b-a3b": 30532,
    "gpt-oss-20b": 20915,
}
ROUND = {"qwen3.5-4b": 4000, "gemma-4-e4b": 8000}  # of these the cards state round figures only, E4B's with embeddings


def test_every_shape_has_its_published_size() -> None:
    assert set(PUBLISHED | ROUND) == set(SHAPES)
    for name, millions in (PUBLISHED | ROUND).items():
        rel = 0.1 if name in ROUND else 1e-3
        assert get_shape(name).num_parameters / 1e6 == pytest.approx(millions, rel=rel), name


def test_names() -> None:
    assert get_shape("Llama-3.2-1B") == get_shape("llama-3.2-1b")
    assert shape_as_dict("embedded", get_shape("embedded"))["name"] == "embedded"
    assert "embedded" in NAMES
    with pytest.raises(ConfigError, match=r"did you mean 'llama-3.2-1b'\?.*--model"):
        get_shape("lama-3.2-1b")
