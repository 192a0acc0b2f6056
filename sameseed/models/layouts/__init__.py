"""Layouts: how the quantized matrices of a safetensors checkpoint are stored, by `quant_method`. One file a method.

A module here has `make(config, raw) -> Layout` of a `quantization_config` (and the whole config.json), which raises
ModelLoadError for what cannot be read. Nothing of the weights is touched before `Layout.find` has checked names, shapes
and types of all tensors that a matrix consists of.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from sameseed.errors import ModelLoadError
from sameseed.models.layouts.base import Layout

METHODS = {
    "compressed-tensors": "compressed_tensors",
    "gptq": "gptq",
    "awq": "awq",
    "bitsandbytes": "bitsandbytes",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "sameseed": "sameseed",
}  # quant_method -> module


def make_layout(raw: Mapping[str, Any], where: str) -> Layout | None:
    """The layout that a config.json describes, None for a dense checkpoint. Raises ModelLoadError."""
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{where}: quantization_config must be an object, got {str(config)[:80]}")
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # older files leave the name out
    module = METHODS.get(method) if isinstance(method, str) else None
    if module is None:
        raise ModelLoadError(
            f"{where}: checkpoints of quant_method {str(method)[:80]!r} cannot be read; these can: "
            f"{', '.join(METHODS)}, and GGUF files; or use the unquantized model and --format"
        )
    made: Layout = importlib.import_module(f"sameseed.models.layouts.{module}").make(config, raw, where)
    return made
