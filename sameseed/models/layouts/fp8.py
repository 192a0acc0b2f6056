"""fp8 checkpoints of methods "fp8" (scales per tensor, or per block: `weight_scale_inv`) and "fbgemm_fp8" (per row)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sameseed.models.layouts.base import FLOATS, Files, Layout, StoredMatrix, listed, say_once, two_sizes
from sameseed.models.layouts.patterns import covers
from sameseed.models.layouts.scaled import float8


class Fp8(Layout):
    """8-bit floats with scales per tensor, per row or per block."""

    unread = (".input_scale", ".activation_scale", ".input_scale_ub")

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        block = config.get("weight_block_size")
        self.block = None if block is None else two_sizes(block, f"{where}: weight_block_size")
        lists = [listed(config.get(n), f"{where}: {n}") for n in ("modules_to_not_convert", "ignored_layers")]
        self.skip = [name for names in lists for name in names]
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
