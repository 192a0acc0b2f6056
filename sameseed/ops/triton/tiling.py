"""How a product is cut into programs: a function of the weight's kind and shape, never of the number of rows.

Chosen by a clock: `benchmarks/gpu_sweep.py` times every cut of an 8B model's products on a GPU at one row. On an H200
programs of four warps were fastest or within 3 % of it for every format, and so many shares that each multiprocessor
has two programs (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sameseed.ops.triton import packing
from sameseed.scheme import QuantTensor

TILE = 16  # rows of one chain of sums (product.TILE)
MAX_TILES = 4  # tiles that share a decoded tile of the weight in one program
OUTPUTS = {"int4": 128}  # of a program, by kind of weight ...
FEWEST = 64  # ... and of others
WARPS = {"both": 8, "nf4": 8}  # kinds that need more registers than four warps have
SPLITS = (1, 2, 4, 8)
SHORTEST = 4  # steps of a share
PROGRAMS = 256  # about two for each multiprocessor of a large GPU
MULTIPROCESSORS = 132  # an H200's
STAGES = {"int4": 3, "int4_bytes": 3}  # steps whose words are on their way at one time, by kind of weight; others: 4


@dataclass(frozen=True)
class Tiling:
    """`steps` of `width` words of `parts` columns each, cut into `split` shares, `outputs` a program."""

    kind: str
    width: int
    parts: int
    steps: int
    split: int
    outputs: int
    warps: int


def tiling(w: QuantTensor) -> Tiling:
    """The one way in which products with `w` are cut. It must not know the rows: their bits hang on `split`."""
    known = w.__dict__.get("_tiling")  # asked for by every launch
    if known is None:
        found, width = packing.words(w), packing.width(w)
        kind, parts = ("dense", 1) if found is None else (found.kind, found.parts)
        known = w.__dict__["_tiling"] = cut(kind, width, parts, -(-w.shape[1] // (width * parts)), w.shape[0])
    return known


@cache
def cut(kind: str, width: int, parts: int, steps: int, outputs: int) -> Tiling:
    """As few shares as give every multiprocessor two programs, or as many as there may be."""
    block = OUTPUTS.get(kind, FEWEST)
    allowed = [n for n in SPLITS if n == 1 or steps >= n * SHORTEST]
    programs = -(-outputs // block)
    split = next((n for n in allowed if n * programs >= PROGRAMS), allowed[-1])
    return Tiling(kind, width, parts, steps, split, block, WARPS.get(kind, 4))


def tiles(num_rows: int) -> int:
    """Tiles of 16 rows in one program: 1, 2 or 4. They share decoded weights and nothing else."""
    return next((n for n in (1, 2) if num_rows <= n * TILE), MAX_TILES)


def warps(how: Tiling, count: int) -> int:
    """Warps of a program of so many tiles: more tiles of many outputs would not fit the registers of four."""
    return how.warps if count == 1 else max(how.warps, how.outputs // 16)


def stages(kind: str, count: int) -> int:
    """Steps whose words are on their way at one time, for so many tiles: within 99 KiB. Sums do not depend on it."""
    return 3 if count == MAX_TILES else STAGES.get(kind, 4)
