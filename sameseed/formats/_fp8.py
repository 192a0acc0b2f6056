"""Shared code of the 8-bit float formats (Micikevicius et al., 2022), with scales per row or per block."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.formats._coded import Coded, compressed_tensors
from sameseed.scheme import QuantArgs, QuantTensor, plain

BLOCK = 128  # rows and columns that share a scale under -b128 (DeepSeek-AI, 2024)
KINDS = ("fp8_e4m3", "fp8_e5m2")


class Float8(Coded):
    """Codes uint8 are the bits of `dtype`; scale = absmax / largest, per row (weights) or per token and head (cache).

    `-b128`: one scale per block of 128 x 128 weights (smaller at the edges). Kernels read scales by row and group of
    columns, so a block's scale is stored for each of its rows. Where 128 does not divide K, the groups are
    gcd(128, K) columns wide, and the scale is also repeated over the groups of the block. `-auto`: e4m3 or e5m2,
    whichever has the smaller error (`choose`).
    The error is at most half a step of the float: 2^-4 of a value in e4m3, 2^-3 in e5m2, more for subnormal values.
    """

    bits = 8
    kv_dtype = torch.uint8

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.largest = torch.finfo(dtype).max
        self.options = frozenset({"activations-fp8", "b128"} | ({"auto"} if dtype == torch.float8_e4m3fn else set()))

    def _codes(self, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of x and scales for absmax a: nearest even, clamped to `largest`."""
        values, scales = scheme.scaled(x, a, self.largest)
        return values.clamp_(-self.largest, self.largest).to(self.dtype).view(torch.uint8), scales

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float()
        return self._codes(x, x.abs().amax(-1, keepdim=True))

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        if args.variant == "auto":
            return scheme.get(choose(weight)).encode(weight, replace(args, variant=None))
        if args.variant != "b128":
            return self.stored(*self.rows(weight))
        height, width = weight.shape
        x = torch.nn.functional.pad(weight.float(), (0, -width % BLOCK, 0, -height % BLOCK))
        x = x.view(x.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        codes, scales = self._codes(x, x.abs().amax((1, 3), keepdim=True))
        codes = codes.flatten(2).flatten(0, 1)[:height, :width]
        return self.stored(codes, spread(scales[:, 0, :, 0], height, width))

    def rows_together(self, args: QuantArgs) -> int:
        return {"b128": BLOCK, "auto": 0}.get(args.variant or "", 1)

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        """Bits in memory. A checkpoint with -b128 takes fewer, since it has one scale per block."""
        return 8 + 32 / (_block_columns(width) if args.variant == "b128" else width)

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return codes.view(self.dtype).float()

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Tensors in compressed-tensors' float-quantized layout: scales [O, 1], or one per block.

        Raises ConfigError where rows of several matrices were joined and a block is no longer whole.
        """
        codes, scales = plain(q).parts["codes"], q.parts["scales"]
        if scales.shape[1] > 1:
            blocks = scales[::BLOCK, :: BLOCK // q.group].contiguous()
            if not spread(blocks, *q.shape).equal(scales):
                raise ConfigError(f"the blocks of {name} were joined with others; store each matrix by itself")
            scales = blocks
        return {f"{name}.weight": codes.view(self.dtype), f"{name}.weight_scale": scales}

    def config(self, q: QuantTensor) -> dict[str, object]:
        if self.dtype != torch.float8_e4m3fn:
            return {}  # no other engine reads e5m2
        blocks = {"strategy": "block", "block_structure": [BLOCK, BLOCK]} if q.parts["scales"].shape[1] > 1 else {}
        return compressed_tensors("float-quantized", q, 8, "float", **blocks)


def _block_columns(width: int) -> int:
    """Columns that share a scale in a -b128 weight of K columns: K if K <= 128, else gcd(128, K)."""
    return width if width <= BLOCK else math.gcd(BLOCK, width)


def spread(scales: Tensor, height: int, width: int) -> Tensor:
    """Repeat the scales of blocks [ceil(O / 128), ceil(K / 128)] to scales of rows and groups [O, K / G]."""
    group = _block_columns(width)
    columns = torch.arange(0, width, group, device=scales.device) // BLOCK
    return scales.repeat_interleave(BLOCK, 0)[:height].index_select(1, columns)


def choose(weight: Tensor) -> str:
    """The 8-bit float that stores weight [O, K] with the smaller squared error, with a scale per row.

    e5m2 has the coarser steps. Its error is smaller only where values span so wide a range that e4m3 rounds the small
    ones to zero (those below about 2^-17 of the largest value of their row).
    """
    errors = dict.fromkeys(KINDS, 0.0)
    for rows in torch.split(weight, max(1, (1 << 20) // max(1, weight.shape[1]))):
        exact = rows.double()
        for name in KINDS:
            fmt = scheme.get(name)
            errors[name] += (fmt.decode(fmt.encode(rows)) - exact).square().sum().item()
    return min(KINDS, key=errors.__getitem__)
