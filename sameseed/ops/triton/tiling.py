"""How a product is cut into programs: a function of the weight's kind and shape, never of the number of rows.

Chosen by arithmetic on paper and by what compilers make of the kernels (docs/guides/gpu.md), not by a clock: an
H200's bandwidth, latency and issue of instructions, and a program that keeps its stages full, are all that `_time`
knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sameseed.ops.triton import packing
from sameseed.scheme import QuantTensor

TILE = 16  # rows of one chain of sums (product.TILE)
MAX_TILES = 4  # tiles that share a decoded tile of the weight in one program
SHAPES = ((64, 4), (128, 8))  # outputs of a program, and its warps
NARROW = {"both": ((64, 8),), "nf4": ((64, 8),)}  # kinds that need more registers than others
SPLITS = (1, 2, 4, 8)
SHORTEST = 4  # steps of a share
MULTIPROCESSORS = 132  # an H200's
RATE = 33.0  # bytes a nanosecond that one of them gets of the memory, and ...
SHARED_RATE = 1.3 * RATE  # ... of the second cache, where rows lie
LATENCY = 800.0  # nanoseconds
COMBINE = 1500.0  # of adding shares
CLOCK, ISSUES, DEPENDENT = 1.755, 4, 0.4  # GHz; instructions a clock of a multiprocessor, and of one warp, which waits
ISSUED = {  # instructions of a warp for each byte of the weight, at one tile of rows (benchmarks/gpu_static.py)
    "dense": 0.03,
    "int8_bytes": 0.035,
    "e4m3": 0.065,
    "e5m2": 0.065,
    "int8": 0.08,
    "both": 0.1,
    "int4": 0.15,
    "int4_bytes": 0.14,
    "upper": 0.14,
    "e2m1": 0.2,
    "nf4": 0.57,
}


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
    found, width = packing.words(w), packing.width(w)
    kind, parts = ("dense", 1) if found is None else (found.kind, found.parts)
    steps = -(-w.shape[1] // (width * parts))
    size = width * sum(t.element_size() for name, t in w.parts.items() if name in packing.PLANES)  # of a step's words
    rows = TILE * width * parts * (1 if w.activations == "int8" else 4 if kind == "dense" and w.format == "fp32" else 2)
    return cut(kind, width, parts, steps, w.shape[0], size, rows)


@cache
def cut(kind: str, width: int, parts: int, steps: int, outputs: int, size: int, rows: int) -> Tiling:
    """The best of all ways: `size` bytes of one output's words and `rows` of 16 rows a step. Asked by every product."""
    cuts = [
        Tiling(kind, width, parts, steps, split, block, warps)
        for block, warps in NARROW.get(kind, SHAPES)
        for split in SPLITS
        if split == 1 or steps >= split * SHORTEST
    ]
    return min(cuts, key=lambda way: _time(way, outputs, size * way.outputs, rows))


def _time(cut: Tiling, outputs: int, tile: int, rows: int) -> float:
    """Nanoseconds of the busiest multiprocessor, roughly: `tile` bytes of the weight and `rows` of 16 rows a step."""
    programs = -(-outputs // cut.outputs) * cut.split
    busiest = -(-programs // MULTIPROCESSORS)
    in_flight = min(busiest, 16 // cut.warps) * (stages(1) - 1) * tile
    warps = min(busiest, 16 // cut.warps) * cut.warps
    issue = tile * ISSUED[cut.kind] / (CLOCK * min(ISSUES, DEPENDENT * warps))
    step = max(tile / RATE, (tile + rows) / SHARED_RATE, LATENCY * tile / in_flight, issue)
    sums = 2 * cut.split * TILE * outputs * 4  # bytes of shares, written and read again
    combine = 0.0 if cut.split == 1 else COMBINE + sums / (MULTIPROCESSORS * SHARED_RATE)
    return LATENCY + busiest * -(-cut.steps // cut.split) * step + combine


def tiles(num_rows: int) -> int:
    """Tiles of 16 rows in one program: 1, 2 or 4. They share decoded weights and nothing else."""
    return next((n for n in (1, 2) if num_rows <= n * TILE), MAX_TILES)


def stages(count: int) -> int:
    """Steps whose words are on their way at one time, for so many tiles: within 99 KiB. Sums do not depend on it."""
    return 3 if count == MAX_TILES else 4
