"""GPTQ checkpoints (Frantar et al., 2023) as AutoGPTQ and GPTQModel write them: codes along K, zero points, g_idx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.models.layouts.base import FLOATS, Files, Layout, StoredMatrix, keep, say_once, stored, unpacked, whole
from sameseed.models.layouts.patterns import fits


@dataclass(frozen=True)
class GptqSettings:
    """Of one matrix. `plus` is what zero points lack: the first version of the layout stores them less one."""

    bits: int
    group: int | None
    symmetric: bool
    plus: int


def make(config: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> GptqLayout:
    """The layout of a `quantization_config`."""
    version = config.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ModelLoadError(
            f"{where}: GPTQ checkpoints in the format {str(version)[:80]!r} cannot be read; gptq and gptq_v2 can"
        )
    settings = _settings(config, GptqSettings(0, None, True, 1 if version == "gptq" else 0), where)
    overrides: list[tuple[str, GptqSettings | None]] = []
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ModelLoadError(f"{where}: dynamic must be an object, got {str(dynamic)[:80]}")
    for pattern, changes in dynamic.items():
        text = pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
        fits(f"re:{text}", "")
        changed = None if pattern.startswith("-:") else _settings(changes, settings, f"{where}: dynamic {pattern}")
        overrides.append((text, changed))
    return GptqLayout(settings, overrides, where)


def _settings(config: object, default: GptqSettings, where: str) -> GptqSettings:
    if not isinstance(config, dict):
        raise ModelLoadError(f"{where} must be an object, got {str(config)[:80]}")
    bits = whole(config, "bits", default.bits or 4, where)
    if bits not in (4, 8):
        raise ModelLoadError(f"{where}: GPTQ with {bits} bits cannot be read; 4 and 8 can")
    group = whole(config, "group_size", default.group or -1, where)
    if group == 0:
        raise ModelLoadError(f"{where}: group_size 0 is none")
    symmetric = bool(config.get("sym", default.symmetric))
    return replace(default, bits=bits, group=None if group == -1 else group, symmetric=symmetric)


class GptqLayout(Layout):
    """The layout of one quantization_config."""

    def __init__(self, settings: GptqSettings, overrides: list[tuple[str, GptqSettings | None]], where: str) -> None:
        self.settings = settings
        self.overrides = overrides
        self.where = where

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        """See Layout."""
        if f"{name}.qweight" not in files:
            return None  # dense, or missing, which is then said of its weight
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
        index = f"{name}.g_idx"
        order = torch.arange(width, dtype=torch.int32) // size
        permuted = False
        if index in files:
            tensors.append(files.expect(index, ["I32", "I64"], (width,)))
            found = files.raw(index)
            if found.min() < 0 or found.max() >= count:
                raise ModelLoadError(f"tensor {index} names groups outside 0..{count - 1}; the file is damaged")
            permuted = not found.equal(order.to(found.dtype))
            order = found if permuted else order
        native = "int4" if s.bits == 4 else "int8"
        kept = None if permuted or (s.bits == 8 and not s.symmetric) else keep(native, width, s.group, s.symmetric)
        why = "GPTQ with act-order, whose groups are permuted"
        return stored(
            tensors,
            kept,
            partial(self._parts, name, files, s),
            order,
            why if permuted else f"GPTQ, {s.bits} bits in groups of {size}",
        )

    def _parts(self, name: str, files: Files, s: GptqSettings) -> tuple[Tensor, Tensor, Tensor | float]:
        codes = unpacked(files.raw(f"{name}.qweight").T, s.bits)
        scales, zeros = files.raw(f"{name}.scales").T.contiguous(), self._zeros(name, files.raw(f"{name}.qzeros"), s)
        if not s.symmetric:
            return codes, scales, zeros
        return (codes, scales, 8.0) if s.bits == 4 else ((codes ^ 128).view(torch.int8), scales, 0.0)

    def _zeros(self, name: str, packed: Tensor, s: GptqSettings) -> Tensor:
        """Zero points uint8 [O, n] of qzeros int32 [n, O bits / 32]. Raises ModelLoadError where sym contradicts."""
        middle = 1 << (s.bits - 1)
        zeros = unpacked(packed, s.bits).T
        if s.plus and not (s.symmetric and (zeros == middle).all()):
            # Writers subtract from whole words, so a zero point of 0 borrows from the next: so are they added.
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
        """Biases of zeros, which older writers give every layer."""
        kind, shape = files.kind(name)
        return name.endswith(".bias") and kind in FLOATS and len(shape) == 1 and not files.raw(name).any()
