"""The normalized Hadamard transform: it spreads an outlier over all values of its block, and is its own inverse."""

from __future__ import annotations

from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] times the orthogonal Hadamard matrix (Sylvester's), as float32 in new memory.

    If D is not a power of two, blocks of the largest power of two that divides D are transformed one by one. Sums run
    in one fixed order (butterflies of neighbours at distance 1, 2, 4, ...; the factor last), element by element. So
    the result is row-invariant: the bits of a row do not depend on the other rows.
    """
    block = x.shape[-1] & -x.shape[-1]
    out, distance = x.float(), 1
    while distance < block:
        pairs = out.reshape(*x.shape[:-1], x.shape[-1] // (2 * distance), 2, distance)
        out = pairs.flip(-2)
        out[..., 0, :] += pairs[..., 0, :]
        out[..., 1, :] -= pairs[..., 1, :]
        distance *= 2
    rotated: Tensor = out.reshape(x.shape) * block**-0.5
    return rotated
