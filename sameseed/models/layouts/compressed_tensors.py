"""compressed-tensors checkpoints: config_groups with targets, and the integer and float layouts of version 0.20."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.models.config import one_of, whole_number
from sameseed.models.layouts.base import (
    FLOATS,
    REMEDY,
    Files,
    Layout,
    StoredMatrix,
    column_groups,
    float_rows,
    listed,
    stored,
    two_sizes,
    unpacked,
)
from sameseed.models.layouts.floats import float8, mxfp4, nvfp4
from sameseed.models.layouts.patterns import fits, spellings

FP4 = {"mxfp4-pack-quantized": mxfp4, "nvfp4-pack-quantized": nvfp4}


@dataclass(frozen=True)
class Group:
    """One entry of config_groups."""

    targets: tuple[str, ...]
    layout: str
    bits: int
    kind: str  # int, float
    symmetric: bool
    strategy: str
    group: int | None  # values along K that share a scale, if the strategy has groups
    block: tuple[int, int] | None
    activations: str | None


def _group(value: object, config: Mapping[str, Any], config_file: str, group: str) -> Group:
    where = f"{config_file}: config_groups {group}"
    weights = value.get("weights") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(weights, dict):
        raise ModelLoadError(f"{where} says nothing of weights; such checkpoints cannot be read")
    layout = value.get("format") or config.get("format")
    kind, strategy = str(weights.get("type", "int")), weights.get("strategy")
    bits, size = whole_number(weights, where, "num_bits", 8), whole_number(weights, where, "group_size", -1, -1)
    block = weights.get("block_structure")
    if strategy is None:
        one = "channel" if size == -1 and "group_size" in weights else "tensor"
        strategy = "block" if block is not None else "group" if size > 0 else one
    if strategy in ("group", "tensor_group") and size < 1:
        raise ModelLoadError(f"{where}: groups of {size} values are none")
    sizes = two_sizes(block, f"{where}: block_structure") if strategy == "block" else None
    one_of(strategy, ("tensor", "channel", "group", "block", "tensor_group"), f"{where}: strategy")
    readable = {
        "pack-quantized": kind == "int" and bits in (4, 8),
        "int-quantized": kind == "int" and bits in (4, 8),
        "float-quantized": kind == "float" and bits == 8,
        "naive-quantized": bits == 8 and kind in ("int", "float"),
        "mxfp4-pack-quantized": kind == "float" and bits == 4 and size == 32,
        "nvfp4-pack-quantized": kind == "float" and bits == 4 and size == 16,
    }
    if not (isinstance(layout, str) and readable.get(layout, False)):
        raise ModelLoadError(
            f"{where}: {bits}-bit {kind} weights in format {str(layout)[:80]!r} are not supported; "
            f"{', '.join(readable)} are, in 4 or 8 bits; {REMEDY}"
        )
    targets = tuple(listed(value, where, "targets"))
    symmetric = weights.get("symmetric", True) is not False
    inputs = value.get("input_activations")
    activations = _activations(inputs, kind)
    if (inputs and activations is None) or value.get("output_activations"):
        float_rows(config_file)
    return Group(targets, layout, bits, kind, symmetric, strategy, size if size > 0 else None, sizes, activations)


def _activations(inputs: object, kind: str) -> str | None:
    """The activation format, if kernels support it (dynamic, 8 bits, by token, of the weights' kind); else None."""
    if not isinstance(inputs, dict) or inputs.get("num_bits", 8) != 8 or inputs.get("type", "int") != kind:
        return None
    dynamic = inputs.get("dynamic") in (True, "local") and inputs.get("strategy") in ("token", "group", None)
    return {"int": "int8", "float": "fp8"}[kind] if dynamic else None


class CompressedTensors(Layout):
    """The groups of settings, each with the modules it applies to."""

    unread = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".input_global_scale")

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        sparsity = config.get("sparsity_config")
        if isinstance(sparsity, dict):
            one_of(sparsity.get("format"), (None, "dense"), f"{where}: sparsity_config's format", REMEDY)
        if re.search(r"'location': '(?!weight)", str(config.get("transform_config"))):  # others are in the weights
            raise ModelLoadError(f"{where}: a transform_config that turns activations is not supported; {REMEDY}")
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise ModelLoadError(f"{where}: quantization_config has no config_groups; download it again")
        self.where = where
        self.groups = [_group(value, config, where, name) for name, value in groups.items()]
        self.ignore = set(listed(config, where, "ignore"))
        self.expressions = [target for target in self.ignore if target.startswith("re:")]  # few among many names
        for target in [*self.ignore, *(t for g in self.groups for t in g.targets)]:
            fits(target, "")  # reject an invalid expression now

    def _group(self, name: str) -> Group | None:
        kind = "Embedding" if name.endswith("embed_tokens") else "Linear"
        if not self.ignore.isdisjoint((kind, *spellings(name))) or any(fits(t, name, kind) for t in self.expressions):
            return None
        # An exact name takes precedence over an expression, and an expression over a class.
        for rank in (lambda t: t in spellings(name), lambda t: t.startswith("re:"), lambda t: True):
            for group in self.groups:
                if any(rank(t) and fits(t, name, kind) for t in group.targets):
                    return group
        return None

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        group = self._group(name)
        weight = f"{name}.weight"
        if group is None or (weight in files and files.kind(weight)[0] in FLOATS):
            return None
        if group.layout in FP4:
            return FP4[group.layout](name, shape, files)
        if group.kind == "float":
            return float8(name, shape, files, group.block, f"{name}.weight_scale", group.activations)
        return self._integers(name, shape, files, group)

    def _integers(self, name: str, shape: tuple[int, int], files: Files, g: Group) -> StoredMatrix:
        height, width = shape
        size = {"tensor": None, "channel": None}.get(g.strategy, g.group)
        count = 1 if size is None else -(-width // size)
        scales = [(height, count)] + ([(height,), (1,), (1, 1), ()] if count == 1 else [])
        packed = g.layout == "pack-quantized"
        if packed:
            per = 32 // g.bits
            tensors = [files.expect(f"{name}.weight_packed", ["I32"], (height, -(-width // per)))]
            if f"{name}.weight_shape" in files:
                tensors.append(files.expect(f"{name}.weight_shape", ["I64", "I32"], (2,)))
                if (said := files.raw(tensors[-1]).tolist()) != list(shape):
                    raise ModelLoadError(f"tensor {tensors[-1]} says {said}, not {list(shape)}; the file is damaged")
        else:
            tensors = [files.expect(f"{name}.weight", ["I8"], shape)]
        tensors.append(files.expect(f"{name}.weight_scale", FLOATS, *scales))
        zeros = f"{name}.weight_zero_point"
        if not g.symmetric:
            if packed:
                files.expect(zeros, ["I32"], (-(-height // per), count))
            else:
                files.expect(zeros, ["I8"], *scales)
        tensors += [zeros] if zeros in files else []
        index = None
        if f"{name}.weight_g_idx" in files:
            tensors.append(files.expect(f"{name}.weight_g_idx", ["I32", "I64"], (width,)))
            if not (files.raw(tensors[-1]) == -1).all():  # -1 means unset
                index = column_groups(tensors[-1], files, size or width, count)
        why = f"{g.bits}-bit codes{'' if g.symmetric else ' with zero points'}"
        parts = partial(_codes, name, shape, files, g, count)
        return stored(tensors, g.bits, parts, width, size, why, g.symmetric, g.activations, index)


def _codes(name: str, shape: tuple[int, int], files: Files, g: Group, n: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `stored` takes."""
    height, width = shape
    scales = files.raw(f"{name}.weight_scale").reshape(-1, n).expand(height, n).contiguous()
    if g.layout == "pack-quantized":
        codes = unpacked(files.raw(f"{name}.weight_packed"), g.bits)[:, :width].contiguous()
        zeros = None if g.symmetric else unpacked(files.raw(f"{name}.weight_zero_point").T, g.bits)[:, :height].T
        return codes, scales, zeros
    codes, zeros = files.raw(f"{name}.weight"), None
    if not g.symmetric:
        zeros = files.raw(f"{name}.weight_zero_point").reshape(-1, n).expand(height, n)
    if g.bits == 8:
        return codes, scales, zeros
    for found in (codes,) if zeros is None else (codes, zeros):
        if found.min() < -8 or found.max() > 7:
            raise ModelLoadError(f"tensor {name}.weight holds more than 4 bits; the file is damaged")
    return (codes + 8).view(torch.uint8), scales, None if zeros is None else (zeros + 8).to(torch.uint8)
