"""The parts of a weight that is packed for the native kernels: shapes, types, and the native description.

csrc/pack.h describes the layouts. A block has BLOCK_OUTPUTS outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.ops._rows import BLOCK_OUTPUTS
from sameseed.scheme import BLOCKS, KQUANTS, QuantTensor

with suppress(ImportError):  # cpu.py then says that the module is missing
    from sameseed import _native

T = TypeVar("T")
SERVED: dict[tuple[str, str | None], int] = {
    ("int8", "int8"): 3,
    ("int4", "int8"): 4,
    ("bf16", None): 1,
    ("bf16", "bf16"): 1,
    ("int8", None): 3,
    ("int8", "outliers"): 3,  # _native_rows.product splits the rows first
    ("int4", None): 4,
    ("nf4", None): 5,
    ("fp8_e4m3", None): 6,
    ("fp8_e5m2", None): 7,
    ("fp8_e4m3", "fp8"): 6,  # _native_rows.product rounds the rows first
    ("fp8_e5m2", "fp8"): 7,
    ("mxfp4", None): 8,
    ("mxfp4", "int8"): 8,
    ("qoq", None): 4,  # the products of int4, with float32 scales
    ("qoq", "int8"): 4,
    ("int8n", "int8"): 9,  # in two planes
    ("int8n", None): 3,  # in whole bytes, as int8
    ("q4_k", "int8"): 10,
    ("q5_k", "int8"): 11,
    ("q6_k", "int8"): 12,
    ("q2_k", "int8"): 13,
    ("q4_1", "int8"): 14,
    ("q5_0", "int8"): 15,
    ("q5_1", "int8"): 16,
    ("iq4_nl", "int8"): 17,
}  # enum Format by (format, activations), for packed weights
SUPER = 256  # super_columns
NESTED = ("int8n", "int8")  # packed as nibbles: a plane of upper halves and a plane of lower halves
BITS = KQUANTS | BLOCKS  # of llama.cpp's codes; what is above the lowest four is a plane of its own
MAX_DEPTH = 1 << 17  # up to this depth, sums of a group's codes are exact in 32 bits
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Format
_NIBBLES = frozenset({"int4", "mxfp4", "nf4", "qoq", *BLOCKS, *KQUANTS})
_PAIRS = frozenset({"bf16", "fp8_e4m3", "fp8_e5m2"})  # packed in pairs of columns
_TYPES = {  # of parts; all others: uint8
    "weight": (torch.bfloat16,),
    "scales": tuple(FLOATS),
    "least": tuple(FLOATS),
    "steps": (torch.int8,),
    "minima": (torch.int8,),
}


def native(call: Callable[..., T], *args: Any, **fields: Any) -> T:
    """A function or a struct of the native module, with tensors given by their addresses, and None by 0."""

    def plain(x: Any) -> Any:
        return x.data_ptr() if isinstance(x, Tensor) else 0 if x is None else x

    return call(*map(plain, args), **{name: plain(x) for name, x in fields.items()})


def columns(w: QuantTensor) -> int:
    """Columns of a step of 128 bytes."""
    if BITS.get(w.format) == 2:  # two bits are packed like the upper two bits of 6-bit codes
        return 16
    return 8 if w.format in _NIBBLES or (w.format, w.activations) == NESTED else 2 if w.format in _PAIRS else 4


def fits(w: QuantTensor) -> bool:
    """Whether some kernel takes a weight of this format and shape, with these groups."""
    (outputs, depth), group = w.shape, w.group
    if (w.format, w.activations) not in SERVED or min(outputs, depth, group) < 1 or depth % group:
        return False
    if w.format in KQUANTS:
        return group == SUPER
    return depth <= MAX_DEPTH and (group == depth or group % 32 == 0)


def codes_of(w: QuantTensor) -> tuple[str, Tensor]:
    """The name and tensor of the part with the codes or numbers; the first plane if there are two."""
    name = next(n for n in ("codes", "high", "weight") if n in w.parts)
    return name, w.parts[name]


def shapes(w: QuantTensor, groups: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the packed parts of a weight whose rows have this many groups, without zero points."""
    (outputs, depth), step, bits = w.shape, columns(w), BITS.get(w.format, 0)
    blocks, padded = -(-outputs // BLOCK_OUTPUTS), -(-depth // 8) * 8
    codes = (blocks, padded // 2, BLOCK_OUTPUTS, 2) if step == 2 else (blocks, padded // step, 2, 16, 4)
    if w.format == "bf16":
        return {"weight": codes}
    scales = (blocks, groups, BLOCK_OUTPUTS)
    if (w.format, w.activations) == NESTED:
        return {"high": codes, "low": codes, "scales": scales}
    found: dict[str, tuple[int, ...]] = {"codes": codes, "scales": scales}
    if bits > 4:
        found["high"] = (blocks, depth * (bits - 4) // 32, 2, 16, 4)
    if bits and "least" in scheme.get(w.format).scale_parts:
        found["least"] = scales
    if w.format in KQUANTS:
        found["steps"] = (blocks, depth // (32 if bits in (2, 6) else 64), 2, 16, 2)
        found |= {"minima": found["steps"]} if "least" in found else {}
    return found


def describe(w: QuantTensor) -> _native.Weight:
    """The native description of a packed weight.

    Raises ValueError or TypeError if the tensors are not as `pack` makes them: a kernel would read outside them.
    """
    if not fits(w):
        about = f"{w.format}, {w.activations}, in groups of {w.group}"
        raise ValueError(f"no kernel takes a packed weight {w.shape} in {about}; pack it again")
    wanted, marks = shapes(w, w.shape[1] // w.group), "nans" if w.format == "fp8_e4m3" else "zeros"
    if "low" not in w.parts:  # a view has only upper halves
        wanted.pop("low", None)
    if marks in w.parts:
        wanted[marks] = wanted["scales"]
    for name, shape in wanted.items():
        t = w.parts.get(name)
        if t is None or tuple(t.shape) != shape or not t.is_contiguous() or not t.is_cpu:
            got = None if t is None else tuple(t.shape)
            raise ValueError(f"{name} {got} of a packed weight {w.shape} in {w.format} must be {shape}; pack it again")
        same = (w.parts["scales"].dtype,) if name == "least" else _TYPES.get(name, (torch.uint8,))
        if t.dtype not in same:
            raise TypeError(f"{name} of a packed weight in {w.format} cannot be {t.dtype}; pack it again")
    kernel = SERVED[w.format, w.activations]
    return native_weight(w, kernel, codes_of(w)[1], zeros=w.parts.get(marks))


def native_weight(
    w: QuantTensor, code: int, codes: Tensor, stride: int = 0, zeros: Tensor | None = None
) -> _native.Weight:
    """The native description of a weight, with the addresses of its tensors. `stride`: elements between dense rows."""
    scales = w.parts.get("scales")
    others = {name: w.parts.get(name) for name in ("scales", "low", "steps", "minima", "least")}
    return native(
        _native.Weight,
        format=code,
        integer_rows=w.activations == "int8",
        bf16_rows=w.activations == "bf16",
        outputs=w.shape[0],
        depth=w.shape[1],
        group=w.group,
        stride=stride,
        codes=codes,
        scale_format=0 if scales is None else FLOATS[scales.dtype],
        zeros=zeros,
        high=w.parts.get("high") if "codes" in w.parts else None,
        **others,
    )
