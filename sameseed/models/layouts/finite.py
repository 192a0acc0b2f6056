"""Whether codes and scales stand for finite numbers: looked at as they are stored, not decoded."""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.scheme import QuantTensor

# Codes of 8-bit floats, less their sign, from which on they are NaN or infinity (Micikevicius et al., 2022, table 1).
ENDS = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7C}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "mxfp4": 6.0, "nf4": 1.0}  # of a code; integers have up to 256
ROWS = 1024  # looked at together, so that the copy without signs is small


def finite(value: QuantTensor | Tensor) -> bool:
    """Whether a matrix [O, K], or what its codes mean by their scales, is finite everywhere in float32."""
    if isinstance(value, Tensor):
        # The sum is the fast check; it may also overflow.
        return bool(value.sum().isfinite()) or bool(value.isfinite().all())
    scales, end = value.parts.get("scales"), ENDS.get(value.format)
    if scales is not None and scales.is_floating_point():
        bound = scales.abs().amax().double() * LARGEST.get(value.format, 256.0)  # NaN, where any scale is
        if not bound <= torch.finfo(torch.float32).max:
            return False
    if end is None:
        return True
    return all(bool(((rows & 0x7F) < end).all()) for rows in torch.split(value.parts["codes"], ROWS))
