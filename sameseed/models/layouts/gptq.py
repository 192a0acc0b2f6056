"""GPTQ checkpoints (Frantar et al., 2023) as AutoGPTQ and GPTQModel write them: codes along K, zero points, g_idx.

AWQ checkpoints (Lin et al., 2023) in AutoAWQ's "gemm" layout: 4 bits along O, interleaved, with zero points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.models.config import whole_number
from sameseed.models.layouts.base import (
    FLOATS,
    Files,
    Layout,
    StoredMatrix,
    column_groups,
    group_size,
    keep,
    nibbles,
    say_once,
    stored,
    unpacked,
)
from sameseed.models.layouts.patterns import fits

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # of AWQ: positions of outputs 0..7 among the eight codes of an int32


@dataclass(frozen=True)
class GptqSettings:
    """Settings of one matrix. `plus`: added to stored zero points, which the layout's first version stores minus 1."""

    bits: int
    group: int | None
    symmetric: bool
    plus: int


def _settings(config: object, default: GptqSettings, where: str) -> GptqSettings:
    if not isinstance(config, dict):
        raise ModelLoadError(f"{where} must be an object, got {str(config)[:80]}")
    bits = whole_number(config, where, "bits", default.bits or 4)
    if bits not in (4, 8):
        raise ModelLoadError(f"{where}: GPTQ with {bits} bits cannot be read; 4 and 8 can")
    group = group_size(config, default.group or -1, where)
    return replace(default, bits=bits, group=group, symmetric=bool(config.get("sym", default.symmetric)))


class GptqLayout(Layout):
    """Settings for all matrices; `overrides` from `dynamic`: expressions with changed settings, or None for dense."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        version = config.get("checkpoint_format") or "gptq"
        if version not in ("gptq", "gptq_v2"):
            raise ModelLoadError(
                f"{where}: GPTQ checkpoints in the format {str(version)[:80]!r} cannot be read; gptq, gptq_v2 and "
                "marlin can"
            )
        self.where = where
        self.settings = _settings(config, GptqSettings(0, None, True, 1 if version == "gptq" else 0), where)
        self.overrides: list[tuple[str, GptqSettings | None]] = []
        dynamic = config.get("dynamic") or {}
        if not isinstance(dynamic, dict):
            raise ModelLoadError(f"{where}: dynamic must be an object, got {str(dynamic)[:80]}")
        for pattern, changes in dynamic.items():
            text = pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
            fits(f"re:{text}", "")
            left_out = pattern.startswith("-:")
            changed = None if left_out else _settings(changes, self.settings, f"{where}: dynamic {pattern}")
            self.overrides.append((text, changed))

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        if f"{name}.qweight" not in files:
            return None  # dense; or missing, which the check of dense tensors reports
        changes = (changed for pattern, changed in self.overrides if fits(f"re:{pattern}", name))
        s = next(changes, self.settings)
        if s is None:
            raise ModelLoadError(f"{self.where}: {name} is not to be quantized, but tensor {name}.qweight is there")
        (height, width), per = shape, 32 // s.bits
        size = s.group or width
        count = -(-width // size)
        if width % per or height % per:
            raise ModelLoadError(f"tensor {name} {list(shape)} cannot be GPTQ: its sizes are no multiples of {per}")
        tensors = [
            files.expect(f"{name}.qweight", ["I32"], (width // per, height)),
            files.expect(f"{name}.qzeros", ["I32"], (count, height // per)),
            files.expect(f"{name}.scales", FLOATS, (count, height)),
        ]
        index = None
        if f"{name}.g_idx" in files:
            tensors.append(files.expect(f"{name}.g_idx", ["I32", "I64"], (width,)))
            index = column_groups(tensors[-1], files, size, count)
        kept = None
        if s.symmetric or s.bits == 4:
            kept = keep("int4" if s.bits == 4 else "int8", width, s.group, s.symmetric)

        def parts() -> tuple[Tensor, Tensor, Tensor | float]:
            codes, scales = unpacked(files.raw(f"{name}.qweight").T, s.bits), files.raw(f"{name}.scales").T.contiguous()
            zeros = self._zeros(name, files.raw(f"{name}.qzeros"), s)
            if not s.symmetric:
                return codes, scales, zeros
            return (codes, scales, 8.0) if s.bits == 4 else ((codes ^ 128).view(torch.int8), scales, 0.0)

        zeros = "" if s.symmetric else " with zero points"
        return stored(tensors, kept, parts, width, s.group, f"{s.bits}-bit GPTQ{zeros}", index)

    def _zeros(self, name: str, packed: Tensor, s: GptqSettings) -> Tensor:
        """Zero points uint8 [O, n] from qzeros int32 [n, O bits / 32]. Raises ModelLoadError if `sym` contradicts."""
        middle = 1 << (s.bits - 1)
        zeros = unpacked(packed, s.bits).T
        if s.plus and not (s.symmetric and (zeros == middle).all()):
            # Writers subtract 1 from each code in whole words, where a zero point of 0 borrows from the next one. So
            # the ones are added to whole words here.
            zeros = unpacked(packed + (0x11111111 if s.bits == 4 else 0x01010101), s.bits).T
        elif s.plus:
            say_once(
                f"{self.where}: its format is gptq, but symmetric zero points are {middle}, not {middle - 1}, as in "
                'gptq_v2; they are read as such ("checkpoint_format": "gptq_v2" there says so)'
            )
        if s.symmetric and not (zeros == middle).all():
            raise ModelLoadError(
                f'{self.where} calls {name} symmetric, but its zero points are not all {middle}; set "sym": false '
                'there, or "checkpoint_format": "gptq_v2" if it was written so'
            )
        return zeros

    def spare(self, name: str, files: Files) -> bool:
        """All-zero biases, which older writers add to every layer, may be ignored."""
        kind, shape = files.kind(name)
        return name.endswith(".bias") and kind in FLOATS and len(shape) == 1 and not files.raw(name).any()


class AwqLayout(Layout):
    """4-bit codes with zero points, in AWQ's layout "gemm"."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise ModelLoadError(f"{where}: AWQ in the layout {version[:80]!r} cannot be read; the layout gemm can")
        bits = whole_number(config, where, "bits", whole_number(config, where, "w_bit", 4))
        if bits != 4:
            raise ModelLoadError(f"{where}: AWQ with {bits} bits cannot be read; 4 can")
        if config.get("zero_point", True) is False:
            raise ModelLoadError(f"{where}: AWQ without zero points cannot be read; store it with zero_point true")
        self.group = group_size(config, whole_number(config, where, "q_group_size", 128, -1), where)

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        if f"{name}.qweight" not in files:
            return None
        height, width = shape
        size = self.group or width
        if height % 8 or width % size:
            raise ModelLoadError(
                f"tensor {name} {list(shape)} cannot be AWQ: 8 must divide its height and {size} its width"
            )
        tensors = (
            files.expect(f"{name}.qweight", ["I32"], (width, height // 8)),
            files.expect(f"{name}.qzeros", ["I32"], (width // size, height // 8)),
            files.expect(f"{name}.scales", FLOATS, (width // size, height)),
        )

        def parts() -> tuple[Tensor, Tensor, Tensor]:
            codes, zeros = _ordered(files.raw(f"{name}.qweight")), _ordered(files.raw(f"{name}.qzeros"))
            return codes, files.raw(f"{name}.scales").T.contiguous(), zeros

        kept = keep("int4", width, self.group, symmetric=False)
        return stored(tensors, kept, parts, width, self.group, "AWQ")


def _ordered(packed: Tensor) -> Tensor:
    """Unpack int32 [N, O / 8] to codes uint8 [O, N]."""
    codes = nibbles(packed).view(packed.shape[0], -1, 8)[..., ORDER]
    return codes.flatten(1).T.contiguous()
