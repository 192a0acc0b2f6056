"""Layouts: how the quantized matrices of a safetensors checkpoint are stored, by `quant_method` or `method`.

A layout is built from a `quantization_config`, and raises ModelLoadError for settings that cannot be read. Weights are
read only after `Layout.find` has checked names, shapes and types of all tensors of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sameseed.errors import ModelLoadError
from sameseed.models.config import one_of, read_json
from sameseed.models.layouts.base import REMEDY, Layout
from sameseed.models.layouts.bitsandbytes import BitsAndBytes
from sameseed.models.layouts.compressed_tensors import CompressedTensors
from sameseed.models.layouts.floats import Fp8, ModelOpt, Mxfp4
from sameseed.models.layouts.gptq import AwqLayout, GptqLayout, MarlinLayout, QqqLayout, auto_round
from sameseed.models.layouts.mlx import Mlx
from sameseed.models.layouts.sameseed import Own


def _gptq(config: Mapping[str, Any], where: str) -> Layout:
    version = config.get("checkpoint_format") or config.get("format")  # GPTQModel's newer key, and transformers'
    marlin = version == "marlin" or bool(config.get("is_marlin_format"))
    return (MarlinLayout if marlin else GptqLayout)({**config, "checkpoint_format": version}, where)


METHODS: dict[str, Callable[[Mapping[str, Any], str], Layout]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": _gptq,
    "marlin": MarlinLayout,
    "qqq": QqqLayout,
    "awq": AwqLayout,
    "auto-round": auto_round,
    "bitsandbytes": BitsAndBytes,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
    "mlx": Mlx,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "mxfp4": Mxfp4,
    "sameseed": Own,
}
# Files in which other tools keep the settings that config.json lacks, and the method where they name none.
BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# Name endings of tensors that only quantized checkpoints have.
PACKED: tuple[str, ...] = (".qweight", ".weight_packed", ".weight.absmax", ".SCB", ".weight_scale", ".weight_scale_inv")
PACKED += (".scales", ".biases", ".trellis", ".q_weight", ".W_q", ".weight._data")


def layout_of(folder: Path) -> Layout | None:
    """The layout of a checkpoint's folder, by config.json or a file of settings beside it. Raises ModelLoadError."""
    path = folder / "config.json"
    raw = read_json(path) if path.exists() else {}
    raw = {**(text if isinstance(text := raw.get("text_config"), dict) else {}), **raw}
    if not (raw.get("quantization_config") or raw.get("compression_config")):
        if isinstance(mlx := raw.get("quantization"), dict):
            raw = {"quantization_config": {**mlx, "quant_method": "mlx"}}
        elif (beside := next((folder / n for n in BESIDE if (folder / n).exists()), None)) is not None:
            path, settings = beside, read_json(beside)
            raw = {"quantization_config": {"quant_method": BESIDE[beside.name], **settings}}
    return make_layout(raw, str(path))


def make_layout(raw: Mapping[str, Any], where: str) -> Layout | None:
    """The layout that a config.json describes, None for a dense checkpoint. Raises ModelLoadError."""
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{where}: quantization_config must be an object, got {str(config)[:80]}")
    method = config.get("quant_method") or config.get("method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # older files do not name the method
    if method is None and "group_size" in config and "quantization" in raw:
        method = "mlx"  # written twice, under either name
    known = one_of(method, METHODS, f"{where}: quant_method", f"or GGUF files: {REMEDY}")
    return METHODS[known]({"num_local_experts": raw.get("num_local_experts"), **config}, where)
