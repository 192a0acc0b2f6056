"""Read the config.json of a draft head; EAGLE heads are read here, block heads by `block_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sameseed.errors import ModelLoadError
from sameseed.models.block_config import parse_block_config
from sameseed.models.config import parse_config, read_json, whole_number
from sameseed.models.head_config import (
    HEADS,
    LAYERS,
    HeadConfig,
    is_block_config,
    layer_architecture,
    layer_settings,
    named_architecture,
)


def read_head_config(folder: Path) -> HeadConfig:
    """HeadConfig of a folder. Raises ModelLoadError naming the field."""
    return parse_head_config(read_json(folder / "config.json"), str(folder / "config.json"))


def parse_head_config(raw: Mapping[str, Any], where: str = "config.json") -> HeadConfig:
    """HeadConfig of a parsed config.json: plain, or of a speculator (with its layer in transformer_layer_config)."""
    algorithm = raw.get("speculators_model_type")
    name = named_architecture(raw)
    if is_block_config(raw):
        return parse_block_config(raw, where)
    kind = HEADS.get(name, "eagle" if name in LAYERS.values() else None)
    if kind in (None, "block") or algorithm not in (None, "eagle3"):
        raise ModelLoadError(
            f"{where}: a draft head of kind {algorithm or name!r} is not supported; these are: {', '.join(HEADS)}"
        )
    inner = layer_settings(raw, where)
    if inner.get("num_hidden_layers", 1) != 1:
        raise ModelLoadError(
            f"{where}: a head of {inner['num_hidden_layers']} layers; only EAGLE heads of one are supported"
        )
    architecture = layer_architecture(inner, "qwen3" if "Qwen3" in name else "llama", where)
    layer = parse_config({**inner, "architectures": [architecture], "num_hidden_layers": 1}, where)
    kinds = inner.get("layer_types")  # may list the target's layers; the first entry is the head's
    slides = kinds[0] == "sliding_attention" if isinstance(kinds, list) and kinds else inner.get("use_sliding_window")
    window = inner.get("sliding_window") if slides else None
    layer = replace(layer, tied_embeddings=False, windows=(window if isinstance(window, int) else None,))
    settings = {**(raw.get("eagle_config") or {}), **raw}
    if settings.get("use_aux_hidden_state") is False:
        raise ModelLoadError(f"{where}: use_aux_hidden_state false is not supported; the head must read three layers")
    aux = settings.get("eagle_aux_hidden_state_layer_ids")
    if aux is not None and (not isinstance(aux, list) or not aux or any(type(v) is not int for v in aux)):
        raise ModelLoadError(f"{where}: eagle_aux_hidden_state_layer_ids must list layers, got {str(aux)[:80]}")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return HeadConfig(
        kind,
        layer,
        whole_number(settings, where, "draft_vocab_size", layer.vocab_size),
        whole_number(settings, where, "target_hidden_size", layer.hidden_size),
        None if aux is None else tuple(aux),
        *(bool(settings.get(flag, False)) for flag in flags),
    )
