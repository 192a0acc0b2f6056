"""How a product is cut into programs: a function of the weight's kind and shape, never of the number of rows.

The parameters were measured for every cut of an 8B model's products with one row (benchmarks/results/gpu_sweep.jsonl).
On an H200, four warps per program, and enough shares for two programs per multiprocessor, were the fastest or within
3 % of the fastest for every format (docs/log/2026-q4.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sameseed.ops.triton import packing
from sameseed.scheme import QuantTensor

TILE = 16  # rows of a tile, which has one chain of sums
MAX_TILES = 4  # most tiles per program; they share the decoded weights
OUTPUTS = {"int4": 128}  # outputs per program, by kind of weight ...
FEWEST = 64  # ... and for all other kinds
WARPS = {"both": 8, "nf4": 8}  # kinds that need more registers than four warps have
SPLITS = (1, 2, 4, 8)
SHORTEST = 4  # fewest steps of a share
PROGRAMS = 256  # about two for each multiprocessor of a large GPU
MULTIPROCESSORS = 132  # of an H200
STAGES = {"int4": 3, "int4_bytes": 3}  # pipeline stages (steps whose words are in flight), by kind; others: 4


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
