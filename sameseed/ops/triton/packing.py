"""Packing of weights for the GPU kernels: words of codes, in the tiles that one step of a product reads.

A word has 16 bits, or 8 if rows of x are int8. It holds one code for each of its parts: part p of word i of a step is
column (step * parts + p) * width + i. `width` words of each of 32 outputs are adjacent, so that a program's step reads
whole lines of memory. The scales and zero points of 32 outputs are adjacent, too. The first axis of packed tensors is
blocks of 32 outputs, so that a weight can be written in chunks of rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.formats.nf4 import single
from sameseed.ops._packed import by_block
from sameseed.ops._rows import BLOCK_OUTPUTS
from sameseed.scheme import QuantTensor

LAYOUT = "triton"
PLANES = ("codes", "high", "low", "weight")  # names of parts that hold words or dense numbers
DENSE = frozenset({"bf16", "fp16", "fp32"})
_MAX_DEPTH = 1 << 17  # up to this depth, sums of products of codes are exact in 32 bits


def interpreted() -> bool:
    """Whether Triton's interpreter replaces a GPU, for tests (TRITON_INTERPRET=1 before the first import)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Words:
    """How words store a weight: the kernel's name for the kind of word, its type, and the number of codes per word."""

    kind: str
    dtype: torch.dtype
    parts: int

    @property
    def bits(self) -> int:
        return self.dtype.itemsize * 8 // self.parts


_WORDS = {  # by format and activations
    ("int4", None): Words("int4", torch.int16, 4),
    ("qoq", None): Words("int4", torch.int16, 4),
    ("nf4", None): Words("nf4", torch.int16, 4),
    ("mxfp4", None): Words("e2m1", torch.int16, 4),
    ("int8", None): Words("int8", torch.int16, 2),
    ("int8n", None): Words("int8", torch.int16, 2),
    ("fp8_e4m3", None): Words("e4m3", torch.int16, 2),
    ("fp8_e5m2", None): Words("e5m2", torch.int16, 2),
    ("fp8_e4m3", "fp8"): Words("e4m3", torch.int16, 2),
    ("fp8_e5m2", "fp8"): Words("e5m2", torch.int16, 2),
    ("int4", "int8"): Words("int4_bytes", torch.uint8, 2),
    ("qoq", "int8"): Words("int4_bytes", torch.uint8, 2),
    ("int8", "int8"): Words("int8_bytes", torch.uint8, 1),
    ("int8n", "int8"): Words("both", torch.uint8, 2),
}
CODED = frozenset(name for name, _ in _WORDS)
CODES = {"int8": torch.int8, "int8n": torch.int8}  # types of codes in the formats' own layout; others: uint8
_ZEROS = frozenset({"int4", "qoq"})


def words(w: QuantTensor) -> Words | None:
    """The kind of words of a weight; None if the weight is dense or no kernel supports it."""
    found = _WORDS.get((w.format, w.activations))
    if found is not None and found.kind == "both" and not w.parts.keys() & {"codes", "low"}:
        return replace(found, kind="upper")
    return found


def takes(w: QuantTensor) -> bool:
    """Whether a kernel supports this weight once it is packed."""
    if w.format in DENSE:
        return w.activations is None and 0 not in w.shape
    found = words(w)
    if found is None or 0 in w.shape or w.shape[1] > _MAX_DEPTH:
        return False
    known = {"codes", "scales"} | ({"zeros", "channel"} if w.format in _ZEROS else set())
    known |= {"sizes", "offset"} if w.format == "nf4" else {"high"} if found.kind == "upper" else set()
    return known >= w.parts.keys() and (w.group == w.shape[1] or w.group in scheme.GROUPS)


def serves(w: QuantTensor) -> bool:
    """Whether a kernel can read this weight in its present layout."""
    return (w.layout == "plain" and w.format in DENSE and takes(w)) or w.layout == LAYOUT


def width(w: QuantTensor) -> int:
    """Words per step and output: 128 bytes, or fewer if groups or rows are shorter."""
    if w.format in DENSE:
        return 32 if w.format == "fp32" else 64
    found = words(w)
    assert found is not None
    widest = 128 // found.dtype.itemsize
    limit = max(32, w.shape[1] // found.parts) if w.group == w.shape[1] else w.group
    return min(widest, 1 << (limit.bit_length() - 1))


def _fold(codes: Tensor, how: Words, size: int) -> Tensor:
    """Pack codes uint8 [O, K] into words [ceil(O / 32), steps, 32, size], padded with zeros."""
    outputs, depth = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -depth % (how.parts * size), 0, -outputs % BLOCK_OUTPUTS))
    parts = padded.view(-1, BLOCK_OUTPUTS, padded.shape[1] // (how.parts * size), how.parts, size).transpose(1, 2)
    out = parts.new_zeros(*parts.shape[:3], size, dtype=torch.int32 if how.dtype is torch.int16 else torch.uint8)
    for part in range(how.parts):
        out |= parts[:, :, :, part].to(out.dtype) << how.bits * part
    return out.to(how.dtype)


def _unfold(folded: Tensor, how: Words, depth: int) -> Tensor:
    """Unpack words [n, steps, size] of n outputs to codes uint8 [n, depth]."""
    mask = (1 << how.bits) - 1
    parts = [(folded >> how.bits * part & mask).to(torch.uint8) for part in range(how.parts)]
    return torch.stack(parts, dim=2).flatten(1)[:, :depth].contiguous()


def _stored(codes: Tensor, how: Words) -> dict[str, Tensor]:
    """Codes [O, K] of a format as the unsigned bytes to pack, by the names of their packed parts."""
    if how.kind in ("both", "upper"):
        halves = codes.view(torch.uint8) + 136  # each half plus 8, modulo 256
        return {"high": halves >> 4} | ({"low": halves & 15} if how.kind == "both" else {})
    codes = codes.view(torch.uint8)
    return {"codes": codes ^ 0x80 if how.kind == "int8" else codes}


def _restored(parts: dict[str, Tensor], how: Words, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inverse of `_stored`."""
    if how.kind == "upper":  # a view has only upper halves
        return {"high": (parts["high"] << 4 ^ 0x80).view(dtype)}
    codes = (parts["high"] << 4 | parts["low"]) - 136 if how.kind == "both" else parts["codes"]
    return {"codes": (codes ^ 0x80 if how.kind == "int8" else codes).view(dtype)}


def pack(w: QuantTensor) -> QuantTensor:
    """Pack `w` for the kernels, on its own device; returns `w` itself if they read it unchanged, or not at all.

    Double quantized scales become single ones: nf4-dq is unpacked as nf4 with float32 scales. Raises ValueError if the
    codes do not fit the shape of `w`.
    """
    how = words(w)
    if w.layout != "plain" or how is None or not takes(w):
        return w
    w = single(w)
    codes = w.parts["high" if how.kind == "upper" else "codes"]
    if codes.element_size() != 1 or tuple(codes.shape) != w.shape:
        raise ValueError(f"codes {tuple(codes.shape)} in {codes.dtype} do not fit a weight {w.shape} in {w.format}")
    parts = {name: _fold(part, how, width(w)) for name, part in _stored(codes.contiguous(), how).items()}
    for name in w.parts.keys() - {"codes", "high"}:
        part = w.parts[name].reshape(w.shape[0], -1)
        parts[name] = by_block(part.half() + 1024 if name == "zeros" and how.kind == "int4" else part)
    return replace(w, parts=parts, layout=LAYOUT)


def unpack(w: QuantTensor) -> QuantTensor:
    """The inverse of pack."""
    if w.layout == "plain":
        return w
    return rows(w, torch.arange(w.shape[0], device=w.parts["scales"].device))


def rows(w: QuantTensor, index: Tensor) -> QuantTensor:
    """Rows `index` [n] of a packed weight, in the format's own layout."""
    index = index.long()
    how = words(w)
    assert how is not None
    block, place = index // BLOCK_OUTPUTS, index % BLOCK_OUTPUTS
    planes = [name for name in PLANES if name in w.parts]
    codes = {name: _unfold(w.parts[name][block, :, place], how, w.shape[1]) for name in planes}
    parts = _restored(codes, how, CODES.get(w.format, torch.uint8))
    for name in w.parts.keys() - set(planes):
        part = w.parts[name][block, :, place]
        parts[name] = (part - 1024).to(torch.uint8) if name == "zeros" and how.kind == "int4" else part
    return replace(w, shape=(index.shape[0], w.shape[1]), parts=parts, layout="plain")


def embedding(token_ids: Tensor, w: QuantTensor) -> Tensor:
    """Rows token_ids [T] of an embedding [V, C] as float32 [T, C]: decoded values, without a product."""
    fmt = scheme.get(w.format)
    if w.layout == "plain":
        return fmt.decode_rows(w, token_ids)
    return fmt.decode(rows(w, token_ids))
