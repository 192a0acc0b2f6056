"""Larger tiles for passes of many rows: the same sums as with tiles of 16 rows, with fewer and larger instructions.

A kernel with larger tiles is used on a device only after a test that it gives the bits of the narrow kernel there
(`same_bits`). In theory both have the same arithmetic (docs/guides/gpu.md). A device where bits differ uses tiles of 16
rows for all passes, so it stays row-invariant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from sameseed.ops.triton.guard import cannot_compile, interpreted
from sameseed.ops.triton.tiling import MAX_TILES, TILE, Tiling, warps

log = logging.getLogger("sameseed.ops")
OUTPUTS = 128  # outputs of a program that computes all shares
FEW = MAX_TILES * TILE  # most rows of one narrow program
_proven: dict[Hashable, bool] = {}


@dataclass(frozen=True)
class Way:
    """Programs of `tile` rows and `outputs` outputs.

    left: the weight is the left operand. whole: one program computes all shares.
    """

    tile: int
    outputs: int
    warps: int
    stages: int
    left: bool
    whole: bool


def way(how: Tiling, form: str, grouped: bool, num_rows: int, capability: tuple[int, int]) -> Way | None:
    """The larger tiles for `num_rows` rows, or None; chosen from compiled code (benchmarks/results/gpu_static.jsonl).

    nf4, and wide tiles of codes below compute capability 9.0, would spill registers. Products of float32 use no tensor
    cores.
    """
    dense, hopper = how.kind == "dense", capability[0] == 9
    if form == "single" or how.kind == "nf4" or num_rows <= TILE or not (dense or capability >= (9, 0)):
        return None
    if num_rows <= FEW:  # weight on the left: 64 rows take one instruction instead of four (wgmma, N = 64)
        tile, count = (FEW // 2, MAX_TILES // 2) if num_rows <= FEW // 2 else (FEW, MAX_TILES)
        return Way(tile, how.outputs, warps(how, count), 3, True, False) if hopper and form != "int8" else None
    if form == "int8":
        return Way(64, OUTPUTS, 8, 2, False, True) if hopper else None
    if grouped or form == "fp8":  # needs a third tile, of sums or scales, so half as many rows
        return Way(64, OUTPUTS, 8, 3, True, True)
    return Way(128, OUTPUTS, 8, 3 if dense else 2, False, True)


def same_bits(
    key: Hashable, device: torch.device, narrow: Callable[[], Tensor], wide: Callable[[], Tensor]
) -> bool | None:
    """Whether `wide()` gives the bits of `narrow()` on this device. Tested once per key; a difference is logged.

    None while a graph is recorded, when results cannot be compared.
    """
    if interpreted():  # true by construction, and tested
        return True
    if (key, device) not in _proven:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        expected = narrow()
        try:
            same = bool((wide().view(torch.int32) == expected.view(torch.int32)).all())
            reason = "has other bits"
        except Exception as error:
            if not cannot_compile(error):
                raise
            same, reason = False, "does not compile"
        if not same:
            log.warning("a kernel of larger tiles %s on %s; tiles of 16 rows serve, which is slower", reason, device)
        _proven[key, device] = same
    return _proven[key, device]


def spread(rows: int, width: int, device: torch.device) -> Tensor:
    """Rows [rows, width] of values with magnitudes up to 2^12 apart, so that sums in another order have other bits."""
    made = torch.Generator().manual_seed(1)
    sizes = torch.randint(-6, 7, (rows, width), generator=made, device="cpu")
    return (torch.randn(rows, width, generator=made, device="cpu") * torch.exp2(sizes.float())).to(device)
