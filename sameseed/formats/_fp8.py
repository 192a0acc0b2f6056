"""The 8-bit floats written once (Micikevicius et al., 2022): codes are their bits, scales are per row or block."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.formats._coded import Coded, compressed_tensors
from sameseed.scheme import SMALLEST, QuantArgs, QuantTensor, over, plain

BLOCK = 128  # rows and columns that share a scale under -b128 (DeepSeek-AI, 2024)
KINDS = ("fp8_e4m3", "fp8_e5m2")


class Float8(Coded):
    """Codes uint8, the bits of `dtype`; scale = absmax / largest of a row (weights) or of a token and head (cache).

    `-b128`: of a block of 128 x 128 weights (smaller at the edges). Scales lie by row and group of columns all the
    same, where kernels find those of groups: repeated over the block's rows, and over its columns where 128 does not
    divide K (groups of gcd(128, K)). `-auto`: e4m3 or e5m2, whichever errs less (`choose`).
    The error is at most half a step of the float, 2^-4 of a value in e4m3 and 2^-3 in e5m2 unless it is subnormal.
    """

    bits = 8
    kv_dtype = torch.uint8

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.largest = torch.finfo(dtype).max
        self.options = frozenset({"activations-fp8", "b128"} | ({"auto"} if dtype == torch.float8_e4m3fn else set()))

    def _codes(self, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of x and scales of absmax a: nearest even, never beyond the largest; rules as quantize_rows."""
        usable = a.isfinite() & (a >= SMALLEST)
        factors = torch.full_like(a, self.largest) / a
        scaled = torch.where(usable, (x * factors).clamp_(-self.largest, self.largest), 0.0)
        scales = torch.where(usable, over(a, self.largest), torch.where(a.isfinite(), 0.0, torch.nan))
        return scaled.to(self.dtype).view(torch.uint8), scales

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float()
        return self._codes(x, x.abs().amax(-1, keepdim=True))

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        if args.variant == "auto":
            chosen = scheme.get(choose(weight)[0])
            return chosen.encode(weight, replace(args, variant=None))
        if args.variant != "b128":
            return self.stored(*self._rows(weight))
        height, width = weight.shape
        x = torch.nn.functional.pad(weight.float(), (0, -width % BLOCK, 0, -height % BLOCK))
        x = x.view(x.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        codes, scales = self._codes(x, x.abs().amax((1, 3), keepdim=True))
        codes = codes.flatten(2).flatten(0, 1)[:height, :width]
        return self.stored(codes, spread(scales[:, 0, :, 0], height, width))

    def rows_together(self, args: QuantArgs) -> int:
        return {"b128": BLOCK, "auto": 0}.get(args.variant or "", 1)

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        """As in memory: a checkpoint has one scale for a block of -b128."""
        return 8 + 32 / (_block_columns(width) if args.variant == "b128" else width)

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return codes.view(self.dtype).float()

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        codes, scales = self._rows(x)  # the scale is per row: a rejected draft must leave no trace
        return codes, scales.squeeze(-1)

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        return codes.contiguous().view(self.dtype).float() * scales[..., None]

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Tensors in compressed-tensors' float-quantized layout: scales [O, 1], or one for each block."""
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
    """Columns of a group in a weight of blocks: all of them, or gcd(128, K)."""
    return width if width <= BLOCK else math.gcd(BLOCK, width)


def spread(scales: Tensor, height: int, width: int) -> Tensor:
    """Scales [ceil(O / 128), ceil(K / 128)] of blocks as [O, K / G] of rows and groups."""
    group = _block_columns(width)
    columns = torch.arange(0, width, group, device=scales.device) // BLOCK
    return scales.repeat_interleave(BLOCK, 0)[:height].index_select(1, columns)


def choose(weight: Tensor) -> tuple[str, dict[str, float]]:
    """The kind of float that stores weight [O, K] best with a scale per row, and each kind's relative RMS error.

    e5m2 has the coarser steps, so it errs less only where values span more than e4m3 can tell from zero beside the
    largest of their row (about 2^-17 of it).
    """
    errors = dict.fromkeys(KINDS, 0.0)
    total = 0.0
    for rows in torch.split(weight, max(1, (1 << 20) // max(1, weight.shape[1]))):
        exact = rows.double()
        total += exact.square().sum().item()
        for name in KINDS:
            fmt = scheme.get(name)
            errors[name] += (fmt.decode(fmt.encode(rows)) - exact).square().sum().item()
    errors = {name: math.sqrt(e / total) if total else 0.0 for name, e in errors.items()}
    return min(KINDS, key=errors.__getitem__), errors
