"""Packing of weights for the native kernels in blocks of 32 outputs: of a format's codes, of floats that are quantized
at once, and of ggml's blocks as they are read from a file. `_layout` has the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.formats._memory import roomy
from sameseed.formats.nf4 import single
from sameseed.ops._layout import (
    BITS,
    FLOATS,
    MAX_DEPTH,
    NESTED,
    SUPER,
    codes_of,
    columns,
    describe,
    fits,
    native,
    shapes,
)
from sameseed.ops._rows import BLOCK_OUTPUTS
from sameseed.scheme import BLOCKS, KQUANTS, FileRows, QuantScheme, QuantTensor

with suppress(ImportError):  # cpu.py then says that the module is missing
    from sameseed import _native

_ZEROS = frozenset({"int4", "int8", "qoq"})  # formats that may have zero points
_ENCODED = ("int4", "int8", "int8n")  # formats that `encode` quantizes and packs at once, for int8 activations
_MULTIPLES = ("steps", "minima")
# enum BlockKind: types of ggml's blocks that are packed as they are read
_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")


def by_block(x: Tensor) -> Tensor:
    """Reorder x [O, K/G] to [O/32, K/G, 32], padded with zeros."""
    whole, rest = divmod(x.shape[0], BLOCK_OUTPUTS)
    if not rest:
        return x.view(whole, BLOCK_OUTPUTS, x.shape[1]).transpose(1, 2).contiguous()
    padded = roomy((whole + 1, x.shape[1], BLOCK_OUTPUTS), x.dtype, x.device).zero_()
    padded[:whole] = x[: whole * BLOCK_OUTPUTS].view(whole, BLOCK_OUTPUTS, x.shape[1]).transpose(1, 2)
    padded[whole, :, :rest] = x[whole * BLOCK_OUTPUTS :].T
    return padded


def _codes(codes: Tensor, w: QuantTensor, shape: tuple[int, ...], zeros: Tensor | None = None) -> Tensor:
    """Pack contiguous codes [O, K] in one byte each (nibbles: their lower halves) in steps of columns."""
    packed = roomy(shape, torch.uint8)
    sizes = {"outputs": w.shape[0], "depth": w.shape[1], "stride": w.shape[1], "groups": w.shape[1] // w.group}
    args = {"plain": codes, "packed": packed, "zeros": zeros, "nibbles": columns(w) == 8}
    _native.pack_codes(native(_native.PackArgs, **args, **sizes))
    return packed


def _high(codes: Tensor, w: QuantTensor, shape: tuple[int, ...], bits: int) -> Tensor:
    """Pack what contiguous codes uint8 [O, K] of `bits` bits have above their lowest four."""
    packed = roomy(shape, torch.uint8)
    native(_native.pack_high, codes, packed, *w.shape, bits)
    return packed


def pack(w: QuantTensor) -> QuantTensor:
    """Pack `w` in blocks of 32 outputs; returns `w` itself if the kernels read it unchanged, or not at all.

    Double quantized scales become single ones: nf4-dq is unpacked as nf4 with float32 scales. Raises ValueError if the
    codes do not fit the shape of `w`.
    """
    if w.layout != "plain" or not fits(w) or (w.format in BLOCKS and w.group != 32):
        return w
    if "zeros" in w.parts and w.format not in _ZEROS:
        return w
    w = single(w)
    (name, codes), nested, bits = codes_of(w), (w.format, w.activations) == NESTED, BITS.get(w.format, 0)
    if name == "high" and not nested:
        return w
    if codes.element_size() != (2 if name == "weight" else 1) or not codes.is_cpu or tuple(codes.shape) != w.shape:
        raise ValueError(f"codes {tuple(codes.shape)} in {codes.dtype} do not fit a weight {w.shape} in {w.format}")
    wanted = shapes(w, w.shape[1] // w.group)
    rest = {n: part.reshape(w.shape[0], -1) for n, part in w.parts.items() if n != name}
    if "zeros" in rest:
        rest["zeros"] = rest["zeros"].to(torch.uint8).contiguous()
    if columns(w) == 2:
        codes = codes if codes.stride(1) == 1 and codes.stride(0) > 0 else codes.contiguous()
        parts = {name: roomy(wanted[name], codes.dtype)}
        native(_native.pack_pairs, codes, parts[name], *w.shape, codes.stride(0), codes.element_size())
        if w.format == "fp8_e4m3":  # the kernel does not recognize NaN, so outputs that have one are marked
            nans = (codes.view(torch.int8).bitwise_and(127) == 127).any(1)
            rest |= {"nans": nans.to(torch.uint8)[:, None].expand_as(rest["scales"])} if nans.any() else {}
    elif nested:  # nibbles of code + 136, i.e. each half plus 8; a view with only the upper halves has one plane
        both = codes.contiguous().view(torch.uint8) + 136  # modulo 256
        parts = {"high": _codes(both >> 4, w, wanted["high"])}
        parts |= {"low": _codes(both, w, wanted["low"])} if name == "codes" else {}
    else:
        codes = codes.contiguous()
        if bits == 2:
            parts = {name: _high(codes << 4, w, wanted[name], 6)}
        else:
            parts = {name: _codes(codes, w, wanted[name], rest.get("zeros"))}
        if bits > 4:
            parts["high"] = _high(codes, w, wanted["high"], bits)
    for part, x in rest.items():
        parts[part] = by_block(x)  # [O / 32, n, 32]
        if part in _MULTIPLES:
            pairs = parts[part].view(len(parts[part]), -1, 2, 2, 16)  # pair, which of the pair, half, output
            parts[part] = roomy(wanted[part], torch.int8).copy_(pairs.permute(0, 1, 3, 4, 2))
    return replace(w, parts=parts, layout="cpu")


def unpack(w: QuantTensor) -> QuantTensor:
    """The inverse of pack."""
    describe(w)  # for its checks
    step, (key, packed), bits = columns(w), codes_of(w), BITS.get(w.format, 0)
    codes = torch.zeros(w.shape, dtype=torch.int8 if step == 4 else packed.dtype)
    if (w.format, w.activations) == NESTED:  # a view has only upper halves; its lower halves count as 0
        both = torch.full(w.shape, 8, dtype=torch.uint8)
        if "low" in w.parts:
            native(_native.unpack_codes, w.parts["low"], both, *w.shape, True)
        native(_native.unpack_codes, packed, codes, *w.shape, True)
        key, codes = "codes" if "low" in w.parts else "high", ((codes << 4 | both) - 136).view(torch.int8)
    elif step == 2:
        native(_native.unpack_pairs, packed, codes, *w.shape, codes.element_size())
    elif bits == 2:
        native(_native.unpack_high, packed, codes, *w.shape, 6)
        codes >>= 4
    else:
        native(_native.unpack_codes, packed, codes, *w.shape, step == 8)
    if bits > 4:
        native(_native.unpack_high, w.parts["high"], codes, *w.shape, bits)
    parts = {key: codes}
    for name in w.parts.keys() - {key, "high", "low", "nans"}:
        part = w.parts[name]
        if name in _MULTIPLES:
            part = part.permute(0, 1, 4, 2, 3).reshape(len(part), -1, BLOCK_OUTPUTS)
        parts[name] = part.transpose(1, 2).flatten(0, 1)[: w.shape[0]].contiguous()
    return replace(w, parts=parts, layout="plain")


def encode(weight: Tensor, quant: QuantScheme) -> QuantTensor | None:
    """Quantize a weight [O, K] in fp32, bf16 or fp16 by `quant` and pack it in one pass; None if not supported.

    Supports int8, int4 and int8n with int8 activations. The bits are those of `pack` after the format's own encoding.
    int8 without groups has float32 scales, all others have bfloat16 scales.
    """
    name, (outputs, depth) = quant.format_for(weight.dtype), weight.shape
    if quant.activations != "int8" or name not in _ENCODED or weight.dtype not in FLOATS:
        return None
    if not weight.is_cpu or weight.stride(1) != 1 or 0 in weight.shape or depth > MAX_DEPTH:
        return None
    group, q = quant.args(depth).group, QuantTensor(name, (outputs, depth), {}, "int8", "cpu")
    wanted, wide = shapes(q, depth // (group or depth)), name == "int8" and group is None
    if not quant.symmetric:
        wanted["zeros"] = wanted["scales"]
    scales = torch.float32 if wide else torch.bfloat16
    parts = {n: roomy(shape, scales if n == "scales" else torch.uint8) for n, shape in wanted.items()}
    q = replace(q, parts=parts)
    written = {"packed": codes_of(q)[1], **{n: parts.get(n) for n in ("scales", "zeros", "low")}}
    given = {"weight": weight, "source": FLOATS[weight.dtype], "stride": weight.stride(0)}
    shape = {"outputs": outputs, "depth": depth, "group": group or depth, "nibbles": columns(q) == 8}
    kinds = {"asymmetric": not quant.symmetric, "wide_scales": wide}
    _native.encode_packed(native(_native.EncodeArgs, **written, **given, **shape, **kinds))
    return q


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
    if any(p.shape[0] % BLOCK_OUTPUTS for p in pieces[:-1]) or depth > MAX_DEPTH:
        return None
    q = QuantTensor(name, (joined, depth), {}, "int8", "cpu")
    types = dict.fromkeys(("scales", "least"), torch.float16) | dict.fromkeys(_MULTIPLES, torch.int8)
    wanted = shapes(q, depth // (SUPER if name in KQUANTS else 32))
    parts = {n: take(shape, types.get(n, torch.uint8), torch.device("cpu")) for n, shape in wanted.items()}
    first = 0
    for p in pieces:
        block = first // BLOCK_OUTPUTS
        rows = dict.fromkeys(("high", "steps", "minima", "least")) | {n: t[block:] for n, t in parts.items()}
        where = {"file": p.file, "begin": p.begin, "kind": _KINDS.index(kind), "order": p.order}
        try:
            _native.read_block_rows(native(_native.BlockRows, **where, outputs=p.shape[0], depth=depth, **rows))
        except RuntimeError as error:
            raise ModelLoadError(f"tensor {p.name} {error}") from None
        first += p.shape[0]
    return replace(q, parts=parts)
