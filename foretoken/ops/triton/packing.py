"""Weights as the GPU's kernels read them: codes by rows, two of 4 bits in a byte, scales by blocks of 32 outputs.

A byte of a 4-bit weight holds column j of two neighbouring units of 32, 64 or 128 columns (a group, where there are
several), the first in its lower half: a tile of bytes is two tiles of codes without any shuffling, each of one group.
Parts lead with O, or with blocks of 32 of it, so that a weight can be written in chunks of rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foretoken.formats import scheme
from foretoken.formats.scheme import QuantTensor

LAYOUT = "triton"
BLOCK = 32  # outputs whose scales lie together
UNITS = (128, 64, 32)
DENSE = frozenset({"bf16", "fp16", "fp32"})
NIBBLES = frozenset({"int4", "qoq"})
CODED = {"int4": "int4", "qoq": "int4", "int8": "int8", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
_ACTIVATIONS = {"int4": (None, "int8"), "int8": (None, "int8"), "e4m3": (None, "fp8"), "e5m2": (None, "fp8")}
_MAX_DEPTH = 1 << 17  # sums of products of codes stay exact in 32 bits


def takes(w: QuantTensor) -> bool:
    """Whether a kernel is made for a weight of this kind, once it is packed."""
    if w.format in DENSE:
        return w.activations is None and 0 not in w.shape
    kind = CODED.get(w.format)
    if kind is None or w.activations not in _ACTIVATIONS[kind] or 0 in w.shape or w.shape[1] > _MAX_DEPTH:
        return False
    known = {"codes", "scales", "channel"} | ({"zeros"} if kind == "int4" else set())
    return known >= w.parts.keys() and (w.group == w.shape[1] or w.group in UNITS)


def serves(w: QuantTensor) -> bool:
    """Whether a kernel takes this weight as it is stored."""
    return (w.layout == "plain" and w.format in DENSE and takes(w)) or w.layout == LAYOUT


def unit(w: QuantTensor) -> int:
    """Columns of one step of a product: a group, or where a row has one scale, as many as its width asks for."""
    if w.group != w.shape[1]:
        return w.group
    return next((u for u in UNITS if w.shape[1] >= u), UNITS[-1])


def by_block(x: Tensor) -> Tensor:
    """x [O, K / G] as [O / 32, K / G, 32], filled up with zeros."""
    blocks = -(-x.shape[0] // BLOCK)
    padded = x.new_zeros(blocks * BLOCK, x.shape[1])
    padded[: x.shape[0]] = x
    return padded.view(blocks, BLOCK, x.shape[1]).transpose(1, 2).contiguous()


def _by_output(x: Tensor, outputs: int) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()


def _fold(codes: Tensor, size: int) -> Tensor:
    """Codes uint8 [O, K] of 4 bits, two in a byte: [O, ceil(K / 2 size) * size]."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (2 * size)))
    halves = padded.view(codes.shape[0], -1, 2, size)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()


def _unfold(folded: Tensor, size: int, depth: int) -> Tensor:
    pairs = folded.view(folded.shape[0], -1, 1, size)
    return torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1)[:, :depth].contiguous()


def pack(w: QuantTensor) -> QuantTensor:
    """`w` as the kernels read it, on its own device; itself where they take it as it is, or not at all.

    Raises ValueError where its codes do not fit its shape.
    """
    if w.layout != "plain" or w.format in DENSE or not takes(w):
        return w
    codes = w.parts["codes"]
    if codes.element_size() != 1 or tuple(codes.shape) != w.shape:
        raise ValueError(f"codes {tuple(codes.shape)} in {codes.dtype} do not fit a weight {w.shape} in {w.format}")
    parts = {"codes": _fold(codes, unit(w)) if w.format in NIBBLES else codes.contiguous()}
    for name in w.parts.keys() - {"codes"}:
        parts[name] = by_block(w.parts[name].reshape(w.shape[0], -1))
    return replace(w, parts=parts, layout=LAYOUT)


def unpack(w: QuantTensor) -> QuantTensor:
    """The inverse of pack."""
    if w.layout == "plain":
        return w
    codes = w.parts["codes"]
    parts = {"codes": _unfold(codes, unit(w), w.shape[1]) if w.format in NIBBLES else codes}
    for name in w.parts.keys() - {"codes"}:
        parts[name] = _by_output(w.parts[name], w.shape[0])
    return replace(w, parts=parts, layout="plain")


def rows(w: QuantTensor, index: Tensor) -> QuantTensor:
    """Rows `index` [n] of a packed weight, in the format's own layout."""
    index = index.long()
    codes = w.parts["codes"].index_select(0, index)
    parts = {"codes": _unfold(codes, unit(w), w.shape[1]) if w.format in NIBBLES else codes}
    for name in w.parts.keys() - {"codes"}:
        parts[name] = w.parts[name][index // BLOCK, :, index % BLOCK]
    return replace(w, shape=(index.shape[0], w.shape[1]), parts=parts, layout="plain")


def embedding(token_ids: Tensor, w: QuantTensor) -> Tensor:
    """Rows of an embedding [V, C] for token_ids [T]; returns float32 [T, C]: values, no products."""
    fmt = scheme.get(w.format)
    if w.layout == "plain":
        return fmt.decode_rows(w, token_ids)
    return fmt.decode(rows(w, token_ids))
