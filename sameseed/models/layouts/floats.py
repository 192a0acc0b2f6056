"""8-bit and 4-bit floats in checkpoints, with scales per tensor, row, block, or group of 32 or 16 values.

The methods "fp8" (scales per tensor, or per block: `weight_scale_inv`) and "fbgemm_fp8" (per row), "mxfp4" (gpt-oss's
experts), and those of TensorRT Model Optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError, say_once
from sameseed.formats import _fp8
from sameseed.formats.mxfp4 import TABLE
from sameseed.models.config import one_of, whole_number
from sameseed.models.layouts.base import (
    FLOATS,
    REMEDY,
    Files,
    Layout,
    StoredMatrix,
    e8m0,
    listed,
    nibbles,
    round_scheme,
    two_sizes,
)
from sameseed.models.layouts.patterns import covers
from sameseed.scheme import QuantScheme, QuantTensor

FORMATS = {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}
ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")  # of TensorRT Model Optimizer
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")
TYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def float8(
    name: str,
    shape: tuple[int, int],
    files: Files,
    block: tuple[int, int] | None,
    scale: str,
    activations: str | None = None,
) -> StoredMatrix:
    """fp8 codes `name.weight` with scales per tensor or row, or with `block` per block: [O / b0, K / b1]."""
    (height, width), weight = shape, f"{name}.weight"
    files.expect(weight, list(TYPES), shape)
    dtype = files.kind(weight)[0]
    ours = block in (None, (_fp8.BLOCK, _fp8.BLOCK))
    if block is None:
        files.expect(scale, FLOATS, (), (1,), (1, 1), (height,), (height, 1))
    else:
        files.expect(scale, [*FLOATS, "F8_E8M0"], (-(-height // block[0]), -(-width // block[1])))

    def read() -> QuantTensor | Tensor:
        scales = files.raw(scale)
        if scales.dtype == torch.uint8:  # e8m0: powers of two
            scales = e8m0(scales)
        scales, codes = scales.float(), files.raw(weight)
        if not ours:
            assert block is not None
            scales = scales.repeat_interleave(min(block[0], height), 0)[:height]
            scales = scales.repeat_interleave(min(block[1], width), 1)[:, :width]
            return codes.view(TYPES[dtype]).float() * scales
        rows = scales.reshape(-1, 1).expand(height, 1) if block is None else _fp8.spread(scales, height, width)
        parts = {"codes": codes, "scales": rows.contiguous()}
        return QuantTensor(FORMATS[dtype], shape, parts, activations)

    variant = None if block is None else "b128"
    scheme = QuantScheme(FORMATS[dtype], activations=activations, variant=variant) if ours else round_scheme(width)
    why = "" if ours else f"fp8 in blocks of {block}"
    return StoredMatrix((weight, scale), scheme, read, why)


def mxfp4(name: str, shape: tuple[int, int], files: Files) -> StoredMatrix:
    """Two e2m1 codes per byte (the first in the low half), with a power of two as e8m0 scale for every 32 codes."""
    height, width = shape
    if width % 32:
        raise ModelLoadError(f"tensor {name} {list(shape)} cannot be mxfp4: its rows are no multiple of 32")
    codes_at = files.expect(f"{name}.weight_packed", ["U8"], (height, width // 2))
    scale_at = files.expect(f"{name}.weight_scale", ["U8", "F8_E8M0"], (height, width // 32))

    def read() -> QuantTensor:
        parts = {"codes": nibbles(files.raw(codes_at)), "scales": e8m0(files.raw(scale_at))}
        return QuantTensor("mxfp4", shape, parts)

    return StoredMatrix((codes_at, scale_at), QuantScheme("mxfp4"), read)


def nvfp4(
    name: str,
    shape: tuple[int, int],
    files: Files,
    codes: str = "weight_packed",
    whole: str = "weight_global_scale",
    inverse: bool = True,
) -> StoredMatrix:
    """Two e2m1 codes per byte (the first in the low half), an e4m3 scale per 16 codes, and one for the whole matrix.

    `codes`, `whole`: names of the tensors. `inverse`: the scale of the whole matrix divides the others.
    """
    height, width = shape
    if width % 16:
        raise ModelLoadError(f"tensor {name} {list(shape)} cannot be nvfp4: its rows are no multiple of 16")
    tensors = (
        files.expect(f"{name}.{codes}", ["U8"], (height, width // 2)),
        files.expect(f"{name}.weight_scale", ["F8_E4M3"], (height, width // 16)),
        files.expect(f"{name}.{whole}", FLOATS, (1,), ()),
    )

    def read() -> Tensor:
        packed, scales, largest = (files.raw(t) for t in tensors)
        scales, largest = scales.view(torch.float8_e4m3fn).float(), largest.float()
        scales = scales / largest if inverse else scales * largest
        return (TABLE[nibbles(packed).int()].view(height, -1, 16) * scales[..., None]).flatten(1)

    return StoredMatrix(tensors, round_scheme(width), read, "NVFP4")


class Fp8(Layout):
    """8-bit floats with scales per tensor, per row or per block."""

    unread = (".input_scale", ".activation_scale", ".input_scale_ub")

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        block = config.get("weight_block_size")
        self.block = None if block is None else two_sizes(block, f"{where}: weight_block_size")
        self.skip = listed(config, where, "modules_to_not_convert", "ignored_layers")
        self.where = where
        if config.get("activation_scheme") == "dynamic" or config.get("quant_method") == "fbgemm_fp8":
            say_once(f"{where}: made for rows that are rounded to 8-bit floats as they come; here rows stay float32")

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        weight = f"{name}.weight"
        dense = any(covers(s, name) for s in self.skip) or weight not in files or name.endswith("embed_tokens")
        if dense or files.kind(weight)[0] in FLOATS:
            return None
        # weight_scale_inv multiplies the codes like any scale: it is the inverse of the factor used in quantization.
        inverse = f"{weight}_scale_inv"
        return float8(name, shape, files, self.block, inverse if inverse in files or self.block else f"{weight}_scale")


class ModelOpt(Layout):
    """The settings of hf_quant_config.json (under "quantization"), or the same in config.json."""

    unread = (".input_scale",)

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        inner = config.get("quantization")
        settings = inner if isinstance(inner, dict) else config
        self.where, parts, layers = where, [settings], settings.get("quantized_layers")
        if settings.get("quant_algo") == "MIXED_PRECISION" and isinstance(layers, dict):
            parts = [part for part in layers.values() if isinstance(part, dict)]
        for part in parts:
            one_of(str(part.get("quant_algo")).upper(), ALGORITHMS, f"{where}: quant_algo", REMEDY)
        self.skip = listed(settings, where, "exclude_modules", "ignore")

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        weight = f"{name}.weight"
        if weight not in files or files.kind(weight)[0] in FLOATS:
            return None
        if any(fnmatchcase(name, s) or covers(s, name) for s in self.skip):
            raise ModelLoadError(f"{self.where} excludes {name}, and its tensor is {files.kind(weight)[0]}")
        if files.kind(weight)[0] == "U8":
            return nvfp4(name, shape, files, "weight", "weight_scale_2", inverse=False)
        return float8(name, shape, files, None, f"{weight}_scale")


class Mxfp4(Layout):
    """`gate_up_proj_blocks` [E, 2 F, C / 32, 16], even rows the gate's, with `_scales`; `down_proj` likewise."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.num_experts = whole_number(config, where, "num_local_experts")

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        if (expert := EXPERT.fullmatch(name)) is None:
            return None
        (height, width), index, part = shape, int(expert[2]), expert[3]
        stacked = f"{expert[1]}.{'down' if part == 'down' else 'gate_up'}_proj"
        if f"{stacked}_blocks" not in files:
            return None
        rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[part]
        whole = (self.num_experts, height if part == "down" else 2 * height, width // 32)
        codes_at = files.expect(f"{stacked}_blocks", ["U8"], (*whole, 16))
        scales_at = files.expect(f"{stacked}_scales", ["U8"], whole)

        def read() -> QuantTensor:
            blocks, exponents = files.raw(codes_at, index)[rows], files.raw(scales_at, index)[rows]
            parts = {"codes": nibbles(blocks.flatten(1)), "scales": e8m0(exponents)}
            return QuantTensor("mxfp4", shape, parts, "int8")

        return StoredMatrix((codes_at, scales_at), QuantScheme("mxfp4", activations="int8"), read)
