"""How a product is cut into programs: a function of the weight's kind and shape, never of the number of rows.

The parameters were measured for every cut of an 8B model's products with one row (benchmarks/results/gpu_sweep.jsonl).
On an H200, four warps per program, and enough shares for two programs per multiprocessor, were the fastest or within
3 % of the fastest for every format (docs/log/2026-q4.md).

Passes of many rows may use larger tiles (`Way`): the same sums, with fewer and larger instructions. Such a kernel is
used on a device only after a test that it gives the bits of the narrow kernel there (`same_bits`). In theory both have
the same arithmetic (docs/guides/gpu.md). A device where bits differ uses tiles of 16 rows for all passes, so it stays
row-invariant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sameseed.ops.triton import packing
from sameseed.ops.triton.guard import cannot_compile, interpreted
from sameseed.scheme import QuantTensor

log = logging.getLogger("sameseed.ops")
TILE = 16  # rows of a tile, which has one chain of sums
MAX_TILES = 4  # most tiles per program; they share the decoded weights
FEW = MAX_TILES * TILE  # most rows of one program of such tiles
OUTPUTS = {"int4": 128}  # outputs per program, by kind of weight ...
FEWEST = 64  # ... and for all other kinds
WARPS = {"both": 8, "nf4": 8}  # kinds that need more registers than four warps have
SPLITS = (1, 2, 4, 8)
SHORTEST = 4  # fewest steps of a share
PROGRAMS = 256  # about two for each multiprocessor of a large GPU
MULTIPROCESSORS = 132  # of an H200
STAGES = {"int4": 3, "int4_bytes": 3}  # pipeline stages (steps whose words are in flight), by kind; others: 4
WHOLE_OUTPUTS = 128  # outputs of a program that computes all shares
_proven: dict[Hashable, bool] = {}


@dataclass(frozen=True)
class Tiling:
    """`steps` steps of `width` words with `parts` codes each, cut into `split` shares; `outputs` per program."""

    kind: str
    width: int
    parts: int
    steps: int
    split: int
    outputs: int
    warps: int


def tiling(w: QuantTensor) -> Tiling:
    """How products with `w` are cut. This must not depend on the number of rows, because bits depend on `split`."""
    known = w.__dict__.get("_tiling")  # cached, because every launch needs it
    if known is None:
        found, width = packing.words(w), packing.width(w)
        kind, parts = ("dense", 1) if found is None else (found.kind, found.parts)
        known = w.__dict__["_tiling"] = cut(kind, width, parts, -(-w.shape[1] // (width * parts)), w.shape[0])
    return known


@cache
def cut(kind: str, width: int, parts: int, steps: int, outputs: int) -> Tiling:
    """Choose the fewest shares that give every multiprocessor two programs, or the most that are allowed."""
    block = OUTPUTS.get(kind, FEWEST)
    allowed = [n for n in SPLITS if n == 1 or steps >= n * SHORTEST]
    programs = -(-outputs // block)
    split = next((n for n in allowed if n * programs >= PROGRAMS), allowed[-1])
    return Tiling(kind, width, parts, steps, split, block, WARPS.get(kind, 4))


def tiles(num_rows: int) -> int:
    """Number of tiles of 16 rows per program: 1, 2 or 4. They share the decoded weights and nothing else."""
    return next((n for n in (1, 2) if num_rows <= n * TILE), MAX_TILES)


def warps(how: Tiling, count: int) -> int:
    """Warps of a program with `count` tiles. Several tiles of many outputs do not fit in four warps' registers."""
    return how.warps if count == 1 else max(how.warps, how.outputs // 16)


def stages(kind: str, count: int) -> int:
    """Pipeline stages of a program with `count` tiles, within 99 KiB of shared memory. No bits depend on it."""
    return 3 if count == MAX_TILES else STAGES.get(kind, 4)


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


def way_for(how: Tiling, form: str, grouped: bool, num_rows: int, capability: tuple[int, int]) -> Way | None:
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
        return Way(64, WHOLE_OUTPUTS, 8, 2, False, True) if hopper else None
    if grouped or form == "fp8":  # needs a third tile, of sums or scales, so half as many rows
        return Way(64, WHOLE_OUTPUTS, 8, 3, True, True)
    return Way(128, WHOLE_OUTPUTS, 8, 3 if dense else 2, False, True)


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
