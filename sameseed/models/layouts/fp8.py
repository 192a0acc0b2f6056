"""fp8 checkpoints of the methods "fp8" (a scale a tensor, or blocks: `weight_scale_inv`) and "fbgemm_fp8" (rows)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sameseed.models.layouts.base import FLOATS, Files, Layout, StoredMatrix, cache_scales_left_out, listed, two_sizes
from sameseed.models.layouts.patterns import covers
from sameseed.models.layouts.scaled import float8


def make(config: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> Fp8:
    """The layout of a `quantization_config`."""
    block = config.get("weight_block_size")
    skip = [k for n in ("modules_to_not_convert", "ignored_layers") for k in listed(config.get(n), f"{where}: {n}")]
    return Fp8(None if block is None else two_sizes(block, f"{where}: weight_block_size"), skip, where)


class Fp8(Layout):
    """The layout of one quantization_config."""

    def __init__(self, block: tuple[int, int] | None, skip: list[str], where: str) -> None:
        self.block = block
        self.skip = skip
        self.where = where

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        """See Layout."""
        weight = f"{name}.weight"
        dense = any(covers(s, name) for s in self.skip) or weight not in files or name.endswith("embed_tokens")
        if dense or files.kind(weight)[0] in FLOATS:
            return None
        # The "inverse" multiplies as any scale: it is that of the quantization.
        inverse = f"{weight}_scale_inv"
        return float8(name, shape, files, self.block, inverse if inverse in files or self.block else f"{weight}_scale")

    def spare(self, name: str, files: Files) -> bool:
        """Scales of activations, and of the cache: ours are per row."""
        if name.endswith((".k_scale", ".v_scale")):
            cache_scales_left_out(self.where)
            return True
        return name.endswith((".input_scale", ".activation_scale", ".input_scale_ub"))
