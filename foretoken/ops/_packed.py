"""Weights packed for the native kernels: blocks of 32 outputs, as csrc/pack.h says."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.formats.scheme import QuantTensor

with suppress(ImportError):  # cpu.py then says that the module is missing
    from foretoken import _native

SERVED: dict[tuple[str, str | None], int] = {
    ("int8", "int8"): 3,
    ("int4", "int8"): 4,
}  # (format, activations) that kernels take packed: enum Format
ROWS_PER_PACK = 32  # block_outputs in csrc/kernels.h
_NIBBLES = frozenset({"int4", "nf4"})
_MAX_DEPTH = 1 << 17  # sums of a group's codes stay exact in 32 bits
_SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Format
_HUGE = 1 << 21  # bytes of a huge page


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor, aligned to a cache line; on huge pages, where the system gives them, if it is large."""
    size = math.prod(shape) * dtype.itemsize
    if size < 2 * _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` as long as a tensor lives in it
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size].view(dtype).view(shape)


def _sizes(w: QuantTensor) -> tuple[int, int, int, int]:
    """Blocks of outputs, padded depth, groups of a row, columns that a step of 128 bytes holds."""
    return (
        -(-w.shape[0] // ROWS_PER_PACK),
        -(-w.shape[1] // 8) * 8,
        w.shape[1] // w.group,
        8 if w.format in _NIBBLES else 4,
    )


def _by_block(x: Tensor, blocks: int, fill: int) -> Tensor:
    """x [O, K/G] as [O/32, K/G, 32], filled up with `fill`."""
    padded = _allocate((blocks, x.shape[1], ROWS_PER_PACK), x.dtype).fill_(fill)
    whole = x.shape[0] // ROWS_PER_PACK
    padded[:whole] = x[: whole * ROWS_PER_PACK].view(whole, ROWS_PER_PACK, x.shape[1]).transpose(1, 2)
    padded[whole:, :, : x.shape[0] % ROWS_PER_PACK] = x[whole * ROWS_PER_PACK :].T
    return padded


def pack(w: QuantTensor) -> QuantTensor:
    """`w` in blocks of 32 outputs as the kernels read it; itself where they take it as it is, or not at all."""
    depth = w.shape[1]
    if w.layout != "plain" or (w.format, w.activations) not in SERVED or depth > _MAX_DEPTH or 0 in w.shape:
        return w
    if (w.group != depth and w.group % 32) or depth % w.group:
        return w
    blocks, padded, groups, columns = _sizes(w)
    codes, zeros = w.parts["codes"].contiguous(), w.parts.get("zeros")
    if codes.element_size() != 1 or not codes.is_cpu or tuple(codes.shape) != w.shape:
        raise ValueError(f"codes {tuple(codes.shape)} in {codes.dtype} do not fit a weight {w.shape} in {w.format}")
    zeros = None if zeros is None else zeros.to(torch.uint8).reshape(-1, groups).contiguous()
    packed = _allocate((blocks, padded // columns, 2, 16, 4), torch.uint8)
    _native.pack_codes(
        codes.data_ptr(),
        packed.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        *w.shape,
        groups,
        depth,
        columns == 8,
    )
    parts = {"codes": packed, "scales": _by_block(w.parts["scales"].reshape(-1, groups), blocks, 0)}
    if zeros is not None:
        parts["zeros"] = _by_block(zeros, blocks, 0)
    return replace(w, parts=parts, layout="cpu")


def encode(weight: Tensor, name: str, group: int | None = None, symmetric: bool = True) -> QuantTensor:
    """weight [O, K] in int8 or int4 with int8 activations, rounded and packed in one pass; float32, bf16 or fp16 in.

    Bit for bit pack of the format's own encoding: int8 without a group has float32 scales, all else bfloat16 ones.
    Raises ValueError for a group that does not divide K or that no kernel takes.
    """
    outputs, depth = weight.shape
    columns = group or depth
    if weight.dtype not in _SCALES or not weight.is_cpu or weight.stride(1) != 1 or (name, "int8") not in SERVED:
        raise ValueError(f"a weight {weight.dtype}, {weight.stride()} cannot be stored in {name!r} here")
    if (
        depth % columns
        or (columns != depth and columns % 32)
        or depth > _MAX_DEPTH
        or not (symmetric or name == "int4")
    ):
        raise ValueError(f"no kernel takes {name} with groups of {group} in rows of {depth}; choose 32, 64 or 128")
    blocks, groups, wide = -(-outputs // ROWS_PER_PACK), depth // columns, name == "int8" and group is None
    step = 8 if name in _NIBBLES else 4
    parts = {
        "codes": _allocate((blocks, -(-depth // 8) * 8 // step, 2, 16, 4), torch.uint8),
        "scales": _allocate((blocks, groups, ROWS_PER_PACK), torch.float32 if wide else torch.bfloat16),
    }
    if not symmetric:
        parts["zeros"] = _allocate((blocks, groups, ROWS_PER_PACK), torch.uint8)
    _native.encode_packed(
        weight.data_ptr(),
        _SCALES[weight.dtype],
        weight.stride(0),
        outputs,
        depth,
        columns,
        step == 8,
        not symmetric,
        wide,
        parts["codes"].data_ptr(),
        parts["scales"].data_ptr(),
        0 if symmetric else parts["zeros"].data_ptr(),
    )
    return QuantTensor(name, (outputs, depth), parts, "int8", "cpu")


def unpack(w: QuantTensor) -> QuantTensor:
    """The inverse of pack."""
    describe(w)  # for its checks
    columns = _sizes(w)[3]
    codes = torch.empty(w.shape, dtype=torch.uint8 if columns == 8 else torch.int8)
    _native.unpack_codes(w.parts["codes"].data_ptr(), codes.data_ptr(), *w.shape, columns == 8)
    parts = {"codes": codes}
    for name in w.parts.keys() - {"codes"}:
        parts[name] = w.parts[name].transpose(1, 2).flatten(0, 1)[: w.shape[0]].contiguous()
    return replace(w, parts=parts, layout="plain")


def _kind(w: QuantTensor) -> tuple[object, ...]:
    return w.format, w.layout, w.activations, f"K = {w.shape[1]}", f"group {w.group}"


def concat(parts: Seq[QuantTensor]) -> QuantTensor:
    """Packed weights as one, along O. Raises ValueError unless all but the last have a multiple of 32 outputs."""
    first = parts[0]
    for w in parts:
        if _kind(w) != _kind(first):
            raise ValueError(f"a weight {_kind(w)} does not fit one {_kind(first)}; join weights of one kind")
    if any(w.shape[0] % ROWS_PER_PACK for w in parts[:-1]):
        raise ValueError(
            f"packed weights of {[w.shape[0] for w in parts]} outputs cannot be joined; join them before pack"
        )
    joined = {}
    for name, part in first.parts.items():
        pieces = [w.parts[name] for w in parts]
        out = _allocate((sum(p.shape[0] for p in pieces), *part.shape[1:]), part.dtype)
        joined[name] = torch.cat(pieces, out=out)
    return replace(first, shape=(sum(w.shape[0] for w in parts), first.shape[1]), parts=joined)


def describe(w: QuantTensor) -> _native.Weight:
    """Raises ValueError where the tensors are not those that pack makes: a kernel would read outside them."""
    if (w.format, w.activations) not in SERVED:
        raise ValueError(f"no packed weight is in {w.format} with activations {w.activations}; pack it again")
    (outputs, depth), codes, scales = w.shape, w.parts["codes"], w.parts["scales"]
    blocks, padded, groups, columns = _sizes(w)
    zeros = w.parts.get("zeros")
    wanted = {"codes": (blocks, padded // columns, 2, 16, 4), "scales": (blocks, groups, ROWS_PER_PACK)}
    if zeros is not None:
        wanted["zeros"] = wanted["scales"]
    for name, shape in wanted.items():
        part = w.parts[name]
        if tuple(part.shape) != shape or not part.is_contiguous() or not part.is_cpu:
            raise ValueError(
                f"{name} {tuple(part.shape)} of a packed weight {w.shape} in {w.format} must be {shape}; pack it again"
            )
    if (
        scales.dtype not in _SCALES
        or codes.dtype is not torch.uint8
        or (zeros is not None and zeros.dtype is not torch.uint8)
    ):
        raise TypeError(f"a packed weight in {w.format} has codes {codes.dtype}, scales {scales.dtype}; pack it again")
    if groups == 0 or depth % groups or depth > _MAX_DEPTH or (groups > 1 and w.group % 32):
        raise ValueError(f"no kernel takes a packed weight {w.shape} with {groups} groups; pack it again")
    return _native.Weight(
        SERVED[w.format, w.activations],
        w.activations == "int8",
        outputs,
        depth,
        w.group,
        0,
        codes.data_ptr(),
        scales.data_ptr(),
        _SCALES[scales.dtype],
        0 if zeros is None else zeros.data_ptr(),
    )
