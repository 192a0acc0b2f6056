"""8-bit and 4-bit floats in checkpoints, with scales per tensor, row, block, or group of 32 or 16 values."""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.formats import _fp8
from sameseed.formats.mxfp4 import TABLE
from sameseed.models.layouts.base import FLOATS, Files, StoredMatrix, nibbles, round_scheme
from sameseed.scheme import QuantScheme, QuantTensor

FORMATS = {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}
TYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def float8(
    name: str,
    shape: tuple[int, int],
    files: Files,
    block: tuple[int, int] | None,
    scale: str,
    activations: str | None = None,
) -> StoredMatrix:
    """fp8 codes `name.weight` with scales per tensor or row, or with `block` per block: [O / b0, K / b1]."""
    (height, width), weight = shape, f"{name}.weight"
    files.expect(weight, list(TYPES), shape)
    dtype = files.kind(weight)[0]
    ours = block in (None, (_fp8.BLOCK, _fp8.BLOCK))
    if block is None:
        files.expect(scale, FLOATS, (), (1,), (1, 1), (height,), (height, 1))
    else:
        files.expect(scale, [*FLOATS, "F8_E8M0"], (-(-height // block[0]), -(-width // block[1])))

    def read() -> QuantTensor | Tensor:
        scales = files.raw(scale)
        if scales.dtype == torch.uint8:  # e8m0: powers of two
            scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        scales, codes = scales.float(), files.raw(weight)
        if not ours:
            assert block is not None
            scales = scales.repeat_interleave(min(block[0], height), 0)[:height]
            scales = scales.repeat_interleave(min(block[1], width), 1)[:, :width]
            return codes.view(TYPES[dtype]).float() * scales
        rows = scales.reshape(-1, 1).expand(height, 1) if block is None else _fp8.spread(scales, height, width)
        parts = {"codes": codes, "scales": rows.contiguous()}
        return QuantTensor(FORMATS[dtype], shape, parts, activations)

    variant = None if block is None else "b128"
    scheme = QuantScheme(FORMATS[dtype], activations=activations, variant=variant) if ours else round_scheme(width)
    why = "" if ours else f"fp8 in blocks of {block}"
    return StoredMatrix((weight, scale), scheme, read, why)


def mxfp4(name: str, shape: tuple[int, int], files: Files) -> StoredMatrix:
    """Two e2m1 codes per byte (the first in the low half), with a power of two as e8m0 scale for every 32 codes."""
    height, width = shape
    if width % 32:
        raise ModelLoadError(f"tensor {name} {list(shape)} cannot be mxfp4: its rows are no multiple of 32")
    codes_at = files.expect(f"{name}.weight_packed", ["U8"], (height, width // 2))
    scale_at = files.expect(f"{name}.weight_scale", ["U8", "F8_E8M0"], (height, width // 32))

    def read() -> QuantTensor:
        parts = {"codes": nibbles(files.raw(codes_at)), "scales": e8m0(files.raw(scale_at), scale_at)}
        return QuantTensor("mxfp4", shape, parts)

    return StoredMatrix((codes_at, scale_at), QuantScheme("mxfp4"), read)


def e8m0(exponents: Tensor, name: str) -> Tensor:
    """Powers of two from their exponents + 127, bfloat16. Raises ModelLoadError for NaN in tensor `name`."""
    if (exponents == 255).any():
        raise ModelLoadError(f"tensor {name} holds NaN; the file is damaged")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127).to(torch.bfloat16)


def nvfp4(
    name: str,
    shape: tuple[int, int],
    files: Files,
    codes: str = "weight_packed",
    whole: str = "weight_global_scale",
    inverse: bool = True,
) -> StoredMatrix:
    """Two e2m1 codes per byte (the first in the low half), an e4m3 scale per 16 codes, and one for the whole matrix.

    `codes`, `whole`: names of the tensors. `inverse`: the scale of the whole matrix divides the others.
    """
    height, width = shape
    if width % 16:
        raise ModelLoadError(f"tensor {name} {list(shape)} cannot be nvfp4: its rows are no multiple of 16")
    tensors = (
        files.expect(f"{name}.{codes}", ["U8"], (height, width // 2)),
        files.expect(f"{name}.weight_scale", ["F8_E4M3"], (height, width // 16)),
        files.expect(f"{name}.{whole}", FLOATS, (1,), ()),
    )

    def read() -> Tensor:
        packed, scales, largest = (files.raw(t) for t in tensors)
        scales, largest = scales.view(torch.float8_e4m3fn).float(), largest.float()
        scales = scales / largest if inverse else scales * largest
        return (TABLE[nibbles(packed).int()].view(height, -1, 16) * scales[..., None]).flatten(1)

    return StoredMatrix(tensors, round_scheme(width), read, "NVFP4")
