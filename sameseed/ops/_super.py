"""Packing of weights in super-blocks (q2_k, q4_k, q5_k, q6_k), and of all ggml's blocks as they are read from a file.

csrc/pack.h has the layouts of the native kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.formats._memory import roomy
from sameseed.ops._packed import MAX_DEPTH, ROWS_PER_PACK, SCALES, SERVED, by_block, native_weight
from sameseed.scheme import BLOCKS, KQUANTS, FileRows, QuantTensor

with suppress(ImportError):  # cpu.py then says that the module is missing
    from sameseed import _native

_SUPER = 256  # super_columns
_SCALES = ("scales", "least")
_MULTIPLES = ("steps", "minima")
# enum BlockKind: types of ggml's blocks that are packed as they are read
_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")


def _shapes(w: QuantTensor) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
    """Shape and allowed types of each packed part."""
    blocks, depth, bits = -(-w.shape[0] // ROWS_PER_PACK), w.shape[1], KQUANTS[w.format]
    part = 16 if bits in (2, 6) else 32
    found: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "codes": ((blocks, depth // (16 if bits == 2 else 8), 2, 16, 4), (torch.uint8,)),
        "steps": ((blocks, depth // part // 2, 2, 16, 2), (torch.int8,)),
        "scales": ((blocks, depth // _SUPER, ROWS_PER_PACK), tuple(SCALES)),
    }
    if bits > 4:
        found["high"] = (blocks, depth * (bits - 4) // 32, 2, 16, 4), (torch.uint8,)
    if w.format != "q6_k":
        found["minima"], found["least"] = found["steps"], found["scales"]
    return found


def pack(w: QuantTensor) -> QuantTensor:
    """Pack `w` in blocks of 32 outputs; returns `w` itself if no kernel supports it.

    Raises ValueError if the codes do not fit the shape of `w`.
    """
    outputs, depth = w.shape
    if w.layout != "plain" or w.activations != "int8" or 0 in w.shape or depth % _SUPER or w.group != _SUPER:
        return w
    shapes, codes = _shapes(w), w.parts["codes"].contiguous()
    if tuple(codes.shape) != w.shape or codes.dtype is not torch.uint8 or not codes.is_cpu:
        raise ValueError(f"codes {tuple(codes.shape)} in {codes.dtype} do not fit a weight {w.shape} in {w.format}")
    parts = {"codes": roomy(shapes["codes"][0], torch.uint8)}
    if KQUANTS[w.format] == 2:  # two bits are packed like the upper two bits of 6-bit codes
        codes = codes << 4
        _native.pack_high(codes.data_ptr(), parts["codes"].data_ptr(), outputs, depth, 6)
    else:
        at, to = codes.data_ptr(), parts["codes"].data_ptr()
        args = {"plain": at, "packed": to, "outputs": outputs, "depth": depth, "stride": depth}
        _native.pack_codes(_native.PackArgs(**args, zeros=0, groups=1, nibbles=True))
    if "high" in shapes:
        parts["high"] = roomy(shapes["high"][0], torch.uint8)
        _native.pack_high(codes.data_ptr(), parts["high"].data_ptr(), outputs, depth, KQUANTS[w.format])
    for name in (n for n in shapes if n in (*_SCALES, *_MULTIPLES)):
        part = by_block(w.parts[name], len(parts["codes"]), 0)  # [O / 32, n, 32]
        if name in _MULTIPLES:
            pairs = part.view(len(part), -1, 2, 2, 16)  # pair, which of the pair, half, output
            part = roomy(shapes[name][0], torch.int8).copy_(pairs.permute(0, 1, 3, 4, 2))
        parts[name] = part
    return replace(w, parts=parts, layout="cpu")


def read(
    pieces: Seq[FileRows], name: str, take: Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
) -> QuantTensor | None:
    """Read matrices in one type of ggml's blocks, joined along O, straight into packed parts; None if not supported.

    The result is what `pack` makes of a weight in format `name`, in memory from `take`. Raises ModelLoadError
    where a file cannot be read, is too short, or holds a scale that is NaN or infinite.
    """
    kind, depth, joined = pieces[0].kind, pieces[0].shape[1], sum(p.shape[0] for p in pieces)
    if kind not in _KINDS or any(p.kind != kind for p in pieces):  # two types may have one format
        return None
    if any(p.shape[0] % ROWS_PER_PACK for p in pieces[:-1]) or depth > MAX_DEPTH:
        return None
    blocks, small = -(-joined // ROWS_PER_PACK), name not in KQUANTS
    if small:
        columns, groups = 4 if kind == "Q8_0" else 8, depth // 32
        shapes = {"codes": (blocks, depth // columns, 2, 16, 4), "scales": (blocks, groups, ROWS_PER_PACK)}
        shapes |= {"high": (blocks, groups, 2, 16, 4)} if BLOCKS.get(name) == 5 else {}
        shapes |= {"least": shapes["scales"]} if kind in ("Q4_1", "Q5_1") else {}
    else:
        shapes = {n: shape for n, (shape, _) in _shapes(QuantTensor(name, (joined, depth), {}, "int8")).items()}
    types = {n: torch.float16 if n in _SCALES else torch.int8 if n in _MULTIPLES else torch.uint8 for n in shapes}
    parts = {n: take(shape, types[n], torch.device("cpu")) for n, shape in shapes.items()}
    first = 0
    for p in pieces:
        at = {n: t[first // ROWS_PER_PACK :].data_ptr() for n, t in parts.items()}
        order = 0 if p.order is None else p.order.data_ptr()
        rows = dict.fromkeys(("high", "steps", "minima", "least"), 0) | at
        where = {"file": p.file, "begin": p.begin, "kind": _KINDS.index(kind), "order": order}
        try:
            _native.read_block_rows(_native.BlockRows(**where, outputs=p.shape[0], depth=depth, **rows))
        except RuntimeError as error:
            raise ModelLoadError(f"tensor {p.name} {error}") from None
        first += p.shape[0]
    return QuantTensor(name, (joined, depth), parts, "int8", "cpu")


def unpack(w: QuantTensor) -> QuantTensor:
    """The inverse of pack."""
    describe(w)  # for its checks
    outputs, depth = w.shape
    codes = torch.zeros(w.shape, dtype=torch.uint8)
    if KQUANTS[w.format] == 2:
        _native.unpack_high(w.parts["codes"].data_ptr(), codes.data_ptr(), outputs, depth, 6)
        codes >>= 4
    else:
        _native.unpack_codes(w.parts["codes"].data_ptr(), codes.data_ptr(), outputs, depth, True)
    if "high" in w.parts:
        _native.unpack_high(w.parts["high"].data_ptr(), codes.data_ptr(), outputs, depth, KQUANTS[w.format])
    parts: dict[str, Tensor] = {"codes": codes}
    for name in w.parts.keys() - {"codes", "high"}:
        part = w.parts[name]
        if name in _MULTIPLES:
            part = part.permute(0, 1, 4, 2, 3).reshape(len(part), -1, ROWS_PER_PACK)
        parts[name] = part.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()
    return replace(w, parts=parts, layout="plain")


def describe(w: QuantTensor) -> _native.Weight:
    """The native description of a packed weight.

    Raises ValueError or TypeError if the tensors are not as `pack` makes them: a kernel would read outside them.
    """
    if w.activations != "int8" or w.shape[1] % _SUPER or 0 in w.shape:
        raise ValueError(f"no kernel takes a packed weight {w.shape} in {w.format}, {w.activations}; pack it again")
    for name, (shape, dtypes) in _shapes(w).items():
        t = w.parts.get(name)
        if t is None or tuple(t.shape) != shape or not t.is_contiguous() or not t.is_cpu:
            got = None if t is None else tuple(t.shape)
            raise ValueError(f"{name} {got} of a packed weight {w.shape} in {w.format} must be {shape}; pack it again")
        if t.dtype not in dtypes:
            raise TypeError(f"{name} of a packed weight in {w.format} cannot be {t.dtype}; pack it again")
    if "least" in w.parts and w.parts["least"].dtype is not w.parts["scales"].dtype:
        raise TypeError(f"least and scales of a packed weight in {w.format} differ in type; pack it again")
    return native_weight(w, SERVED[w.format, "int8"], w.parts["codes"])
