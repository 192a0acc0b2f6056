"""bitsandbytes checkpoints: nf4 (Dettmers et al., 2023) with plain or nested scales, and int8 (scales `SCB`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.formats.nf4 import TABLE
from sameseed.models.layouts.base import FLOATS, Files, Layout, StoredMatrix, round_scheme, spread
from sameseed.scheme import QuantScheme, QuantTensor

STATE = "weight.quant_state.bitsandbytes__"
MAX_STATE = 1 << 16  # bytes of a quant_state tensor
BLOCK = 64  # group size of our format nf4
STORAGE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # bytes of an element of packed codes


class BitsAndBytes(Layout):
    """The layout of bitsandbytes: the extra tensors of a matrix tell whether and how it is quantized."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        pass

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        weight = f"{name}.weight"
        if weight not in files:
            return None
        if f"{name}.{STATE}fp4" in files:
            raise ModelLoadError(f"tensor {weight} is in bitsandbytes' fp4, which cannot be read; nf4 and int8 can")
        if f"{name}.{STATE}nf4" in files:  # before the type: the bytes of codes may be stored as floats
            return _nf4(name, shape, files)
        if files.kind(weight)[0] in FLOATS:
            return None
        if files.kind(weight)[0] == "I8":
            tensors = [files.expect(weight, ["I8"], shape), files.expect(f"{name}.SCB", ["F32"], (shape[0],))]
            layout = f"{name}.weight_format"
            if layout in files:
                tensors.append(files.expect(layout, ["U8", "I8"], (), (1,)))
                if files.raw(layout).any():
                    raise ModelLoadError(f"tensor {weight} is in a GPU's layout; save it again in the row layout")

            def read() -> QuantTensor:
                scales = files.raw(f"{name}.SCB")[:, None] / 127.0
                return QuantTensor("int8", shape, {"codes": files.raw(weight), "scales": scales.contiguous()})

            return StoredMatrix(tuple(tensors), QuantScheme("int8"), read)
        return _nf4(name, shape, files)  # which says what is missing


def _state(name: str, shape: tuple[int, int], files: Files) -> dict[str, Any]:
    at = f"{name}.{STATE}nf4"
    if at not in files or files.kind(at)[0] != "U8" or math.prod(files.kind(at)[1]) > MAX_STATE:
        raise ModelLoadError(f"tensor {at} is missing or none; the checkpoint was not written by bitsandbytes")
    try:
        state = json.loads(bytes(files.raw(at).flatten().tolist()))
        block = state["blocksize"]
        fits = state["quant_type"] == "nf4" and state["shape"] == list(shape)
        sizes = [b for b in (block, state.get("nested_blocksize")) if b is not None]
        state["nested_offset"] = offset = float(0.0 + state.get("nested_offset", 0.0))  # TypeError for a string
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = repr(error)[:80]
        raise ModelLoadError(f"tensor {at} is no state of bitsandbytes ({reason}); the file is damaged") from None
    if not fits or any(type(b) is not int or not 1 <= b <= 2**20 for b in sizes) or not math.isfinite(offset):
        raise ModelLoadError(f"tensor {at} does not describe nf4 of shape {list(shape)}; the file is damaged")
    return dict(state)


def _nf4(name: str, shape: tuple[int, int], files: Files) -> StoredMatrix:
    (height, width), state = shape, _state(name, shape, files)
    block = state["blocksize"]
    count, values = -(-height * width // block), height * width
    packed = f"{name}.weight"
    # `bnb_4bit_quant_storage`: two codes a byte, and the bytes in elements of any type (FSDP needs one type for all).
    elements = -(-values // (2 * STORAGE.get(files.kind(packed)[0], 1)))
    files.expect(packed, [*STORAGE], (elements, 1), (1, elements), (elements,))
    absmax = f"{packed}.absmax"
    nested = state.get("nested_blocksize")
    tensors = [packed, f"{name}.{STATE}nf4", absmax, files.expect(f"{packed}.quant_map", ["F32"], (16,))]
    if nested is None:
        files.expect(absmax, FLOATS, (count,), (count, 1))
    else:
        files.expect(absmax, ["U8"], (count,), (count, 1))
        tensors.append(files.expect(f"{packed}.nested_absmax", ["F32"], (-(-count // nested),)))
        tensors.append(files.expect(f"{packed}.nested_quant_map", ["F32"], (256,)))
    same = torch.allclose(files.raw(f"{packed}.quant_map"), TABLE, rtol=0, atol=1e-7)
    kept = same and width % BLOCK == 0 and (width % block == 0 and block % BLOCK == 0)

    def read() -> QuantTensor | Tensor:
        data = files.octets(packed)
        codes = torch.stack([data >> 4, data & 15], dim=1).flatten()[:values]
        scales = files.raw(absmax).flatten()
        if nested is not None:
            large = files.raw(f"{packed}.nested_absmax").repeat_interleave(nested)[:count]
            scales = files.raw(f"{packed}.nested_quant_map")[scales.long()] * large + state["nested_offset"]
        if kept:
            short = scales.to(torch.bfloat16)
            scales = short if short.float().equal(scales.float()) else scales.float()
            parts = {"codes": codes.view(shape), "scales": spread(scales.view(height, -1), block // BLOCK).contiguous()}
            return QuantTensor("nf4", shape, parts)
        table = files.raw(f"{packed}.quant_map")
        return (table[codes.long()] * scales.float().repeat_interleave(block)[:values]).view(shape)

    if kept:
        return StoredMatrix(tuple(tensors), QuantScheme("nf4"), read)
    return StoredMatrix(tuple(tensors), round_scheme(width), read, f"nf4 in blocks of {block}")
