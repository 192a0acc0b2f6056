"""Shapes of known models by name (shapes.json: their public config.json), to measure speed without their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError, nearest
from sameseed.models.config import ModelConfig, parse_config
from sameseed.models.loader import read_config, resolve_model

SHAPES: Mapping[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
NAMES = (*SHAPES, "embedded")


def get_shape(name: str, other: str = "--model") -> ModelConfig:
    """The config of a shape. Raises ConfigError with the nearest name and the option for checkpoints (`other`)."""
    known = name.lower()
    if known == "embedded":
        return read_config(resolve_model("embedded"))
    if known not in SHAPES:
        hint = nearest(known, NAMES)
        raise ConfigError(f"no shape {name!r}{hint} (there are: {', '.join(NAMES)}; for a checkpoint, {other})")
    return parse_config(SHAPES[known], where=f"shape {known}")


def shape_as_dict(name: str, config: ModelConfig) -> dict[str, object]:
    """A shape as plain data for a record."""
    facts = "architecture num_parameters num_layers hidden_size intermediate_size num_heads num_kv_heads head_dim "
    facts += "vocab_size max_model_len tied_embeddings"
    distinct = [list(pair) for pair in getattr(config, "distinct", ())]  # rows of a pass, experts that they choose
    found = {"name": name, **{fact: getattr(config, fact) for fact in facts.split()}}
    return {**found, "distinct_experts": distinct} if distinct else found
