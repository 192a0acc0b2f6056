"""MLX checkpoints: codes of 2, 4 or 8 bits in words of 32, with a scale and a bias per group: scale * code + bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.models.config import one_of, whole_number
from sameseed.models.layouts.base import FLOATS, REMEDY, Files, Layout, StoredMatrix, round_scheme
from sameseed.models.layouts.patterns import spellings


class Mlx(Layout):
    """`bits` and `group_size` for all matrices, and a module's own settings under its name."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        weight = f"{name}.weight"
        if weight not in files or files.kind(weight)[0] in FLOATS:
            return None
        own = next((self.config[n] for n in spellings(name) if n in self.config), None)
        settings = own if isinstance(own, dict) else self.config
        bits = whole_number(settings, self.where, "bits", 4, 1)
        group = whole_number(settings, self.where, "group_size", 64, 1)
        (height, width), mode = shape, settings.get("mode", "affine")
        one_of(bits, (2, 4, 8), f"{self.where}: bits of {weight}", REMEDY)
        one_of(mode, ["affine"], f"{self.where}: mode of {weight}", REMEDY)
        if width % group or width * bits % 32:
            raise ModelLoadError(f"{self.where}: {weight} cannot have {bits} bits in groups of {group}; {REMEDY}")
        tensors = [files.expect(weight, ["U32"], (height, width * bits // 32))]
        tensors += [files.expect(f"{name}.{part}", FLOATS, (height, width // group)) for part in ("scales", "biases")]

        def read() -> Tensor:
            words = files.octets(weight).view(height, -1, 1)  # the lowest bits of a byte are the first code
            codes = (words >> torch.arange(0, 8, bits, dtype=torch.uint8)) & (2**bits - 1)
            scales, biases = (files.raw(t).float()[..., None] for t in tensors[1:])
            values: Tensor = (codes.view(height, -1, group).float() * scales + biases).view(height, width)
            return values

        return StoredMatrix(tuple(tensors), round_scheme(width), read, f"MLX's {bits} bits in groups of {group}")
