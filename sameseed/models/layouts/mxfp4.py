"""quant_method mxfp4: gpt-oss's experts, as stacked blocks of 32 e2m1 codes with a power of two as their scale."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sameseed.models.config import whole_number
from sameseed.models.layouts.base import Files, Layout, StoredMatrix, nibbles
from sameseed.models.layouts.scaled import e8m0
from sameseed.scheme import QuantScheme, QuantTensor

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")


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
            parts = {"codes": nibbles(blocks.flatten(1)), "scales": e8m0(exponents, scales_at)}
            return QuantTensor("mxfp4", shape, parts, "int8")

        return StoredMatrix((codes_at, scales_at), QuantScheme("mxfp4", activations="int8"), read)
