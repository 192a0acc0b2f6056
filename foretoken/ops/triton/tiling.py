"""How a product is cut into programs: a function of the weight's kind and shape, never of the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.formats.scheme import QuantTensor
from foretoken.ops.triton import packing

TILE = 16  # rows of one chain of sums (product.TILE)
MAX_TILES = 4  # tiles that share a decoded tile of the weight in one program
OUTPUTS = 64  # of one program
ENOUGH = 256  # programs that keep a large GPU busy; chosen without a GPU at hand
SHORTEST = 4  # steps of a part


@dataclass(frozen=True)
class Tiling:
    """`steps` of `unit` columns each (4-bit codes: two units a step), cut into `split` parts, `outputs` a program."""

    unit: int
    steps: int
    split: int
    outputs: int
    warps: int
    stages: int


def tiling(w: QuantTensor) -> Tiling:
    """The one way in which products with `w` are cut. It must not know the rows: their bits hang on `split`."""
    height, depth = w.shape
    unit = 64 if w.format in packing.DENSE else packing.unit(w)
    width = unit * (2 if w.format in packing.NIBBLES else 1)
    steps = -(-depth // width)
    split = 1
    while 2 * split * -(-height // OUTPUTS) <= ENOUGH and steps >= 2 * split * SHORTEST:
        split *= 2
    return Tiling(unit, steps, split, OUTPUTS, warps=4, stages=3)


def tiles(num_rows: int) -> int:
    """Tiles of 16 rows in one program: 1, 2 or 4. They share decoded weights and nothing else."""
    return next((n for n in (1, 2) if num_rows <= n * TILE), MAX_TILES)
