"""Packing of weights for the native kernels in blocks of 32 outputs; csrc/pack.h describes the layouts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.formats._memory import roomy
from sameseed.formats.nf4 import single
from sameseed.scheme import BLOCKS, QuantScheme, QuantTensor

with suppress(ImportError):  # cpu.py then says that the module is missing
    from sameseed import _native

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
ROWS_PER_PACK = 32  # block_outputs in csrc/kernels.h
_NIBBLES = frozenset({"int4", "mxfp4", "nf4", "qoq", *BLOCKS})
_NESTED = ("int8n", "int8")  # packed as nibbles: a plane of upper halves and a plane of lower halves
_PAIRS = frozenset({"bf16", "fp8_e4m3", "fp8_e5m2"})  # packed in pairs of columns
_ZEROS = frozenset({"int4", "int8", "qoq"})  # formats that may have zero points
_ENCODED = ("int4", "int8", "int8n")  # formats that `encode` quantizes and packs at once, for int8 activations
MAX_DEPTH = 1 << 17  # up to this depth, sums of a group's codes are exact in 32 bits
SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Format


def _sizes(w: QuantTensor) -> tuple[int, int, int, int]:
    """Blocks of outputs, padded depth, groups per row, columns of a step of 128 bytes."""
    return (
        -(-w.shape[0] // ROWS_PER_PACK),
        -(-w.shape[1] // 8) * 8,
        w.shape[1] // w.group,
        8 if w.format in _NIBBLES or (w.format, w.activations) == _NESTED else 2 if w.format in _PAIRS else 4,
    )


def _codes_shape(w: QuantTensor) -> tuple[int, ...]:
    blocks, padded, _, columns = _sizes(w)
    return (blocks, padded // 2, ROWS_PER_PACK, 2) if columns == 2 else (blocks, padded // columns, 2, 16, 4)


def _high_shape(w: QuantTensor) -> tuple[int, ...]:
    """Shape of the plane of fifth bits."""
    return (_sizes(w)[0], w.shape[1] // 32, 2, 16, 4)


def _pack_pairs(w: QuantTensor) -> QuantTensor:
    """Pack fp8 or bf16. "nans" marks outputs with a NaN among their e4m3 codes, which the kernel does not recognize."""
    (name, codes), blocks = _codes(w), _sizes(w)[0]
    codes = codes if codes.stride(1) == 1 and codes.stride(0) > 0 else codes.contiguous()
    packed = roomy(_codes_shape(w), codes.dtype)
    _native.pack_pairs(codes.data_ptr(), packed.data_ptr(), *w.shape, codes.stride(0), codes.element_size())
    parts = {name: packed}
    if name == "codes":
        parts["scales"] = by_block(w.parts["scales"].reshape(w.shape[0], -1), blocks, 0)
        nans = (codes.view(torch.int8).bitwise_and(127) == 127).any(1) if w.format == "fp8_e4m3" else codes.new_zeros(0)
        if nans.any():
            parts["nans"] = by_block(nans.to(torch.uint8)[:, None].expand(-1, _sizes(w)[2]), blocks, 0)
    return replace(w, parts=parts, layout="cpu")


def _codes(w: QuantTensor) -> tuple[str, Tensor]:
    """The name and tensor of the part with the codes or numbers; the first plane if there are two."""
    name = next(n for n in ("codes", "high", "weight") if n in w.parts)
    return name, w.parts[name]


def _pack_codes(codes: Tensor, packed: Tensor, zeros: Tensor | None, w: QuantTensor, nibbles: bool) -> None:
    outputs, depth = w.shape
    _native.pack_codes(
        _native.PackArgs(
            plain=codes.data_ptr(),
            packed=packed.data_ptr(),
            zeros=0 if zeros is None else zeros.data_ptr(),
            outputs=outputs,
            depth=depth,
            groups=_sizes(w)[2],
            stride=depth,
            nibbles=nibbles,
        )
    )


def _plane(codes: Tensor, w: QuantTensor) -> Tensor:
    """Pack the lower halves of codes uint8 [O, K] into blocks."""
    packed = roomy(_codes_shape(w), torch.uint8)
    _pack_codes(codes, packed, None, w, True)
    return packed


def by_block(x: Tensor, blocks: int, fill: int) -> Tensor:
    """Reorder x [O, K/G] to [O/32, K/G, 32], padded with `fill`."""
    if x.shape[0] == blocks * ROWS_PER_PACK:
        return x.view(blocks, ROWS_PER_PACK, x.shape[1]).transpose(1, 2).contiguous()
    padded = roomy((blocks, x.shape[1], ROWS_PER_PACK), x.dtype).fill_(fill)
    whole = x.shape[0] // ROWS_PER_PACK
    padded[:whole] = x[: whole * ROWS_PER_PACK].view(whole, ROWS_PER_PACK, x.shape[1]).transpose(1, 2)
    padded[whole:, :, : x.shape[0] % ROWS_PER_PACK] = x[whole * ROWS_PER_PACK :].T
    return padded


def pack(w: QuantTensor) -> QuantTensor:
    """Pack `w` in blocks of 32 outputs; returns `w` itself if the kernels read it unchanged, or not at all.

    Double quantized scales become single ones: nf4-dq is unpacked as nf4 with float32 scales. Raises ValueError if the
    codes do not fit the shape of `w`.
    """
    depth = w.shape[1]
    if w.layout != "plain" or (w.format, w.activations) not in SERVED or depth > MAX_DEPTH or 0 in w.shape:
        return w
    if (w.group != depth and w.group % 32) or depth % w.group:
        return w
    if ("zeros" in w.parts and w.format not in _ZEROS) or (w.format in BLOCKS and w.group != 32):
        return w
    w = single(w)
    (blocks, _, groups, columns), (name, codes), nested = _sizes(w), _codes(w), (w.format, w.activations) == _NESTED
    if name == "high" and not nested:
        return w
    if codes.element_size() != (2 if name == "weight" else 1) or not codes.is_cpu or tuple(codes.shape) != w.shape:
        raise ValueError(f"codes {tuple(codes.shape)} in {codes.dtype} do not fit a weight {w.shape} in {w.format}")
    if columns == 2:
        return _pack_pairs(w)
    if nested:  # nibbles of code + 136, i.e. each half plus 8; a view with only the upper halves has one plane
        both = codes.contiguous().view(torch.uint8) + 136  # modulo 256
        planes = {"high": _plane(both >> 4, w)} | ({"low": _plane(both, w)} if name == "codes" else {})
        scales = by_block(w.parts["scales"].reshape(w.shape[0], -1), blocks, 0)
        return replace(w, parts={**planes, "scales": scales}, layout="cpu")
    codes, zeros = codes.contiguous(), w.parts.get("zeros")
    zeros = None if zeros is None else zeros.to(torch.uint8).reshape(-1, groups).contiguous()
    packed = roomy(_codes_shape(w), torch.uint8)
    _pack_codes(codes, packed, zeros, w, columns == 8)
    parts = {"codes": packed, "scales": by_block(w.parts["scales"].reshape(-1, groups), blocks, 0)}
    if zeros is not None:
        parts["zeros"] = by_block(zeros, blocks, 0)
    if BLOCKS.get(w.format) == 5:
        parts["high"] = roomy(_high_shape(w), torch.uint8)
        _native.pack_high(codes.data_ptr(), parts["high"].data_ptr(), *w.shape, 5)
    if "least" in w.parts:
        parts["least"] = by_block(w.parts["least"], blocks, 0)
    if "channel" in w.parts:  # no kernel reads it, but it separates the two levels of scales
        parts["channel"] = by_block(w.parts["channel"], blocks, 0)
    return replace(w, parts=parts, layout="cpu")


def encode(weight: Tensor, quant: QuantScheme) -> QuantTensor | None:
    """Quantize a weight [O, K] in fp32, bf16 or fp16 by `quant` and pack it in one pass; None if not supported.

    Supports int8, int4 and int8n with int8 activations. The bits are those of `pack` after the format's own encoding.
    int8 without groups has float32 scales, all others have bfloat16 scales.
    """
    name, (outputs, depth) = quant.format_for(weight.dtype), weight.shape
    if quant.activations != "int8" or name not in _ENCODED or weight.dtype not in SCALES:
        return None
    if not weight.is_cpu or weight.stride(1) != 1 or 0 in weight.shape or depth > MAX_DEPTH:
        return None
    columns, symmetric = quant.args(depth).group or depth, quant.symmetric
    wide, nested = name == "int8" and quant.args(depth).group is None, name == _NESTED[0]
    step, first = 8 if nested or name in _NIBBLES else 4, "high" if nested else "codes"
    blocks = -(-outputs // ROWS_PER_PACK)
    codes, scales = (blocks, -(-depth // 8) * 8 // step, 2, 16, 4), (blocks, depth // columns, ROWS_PER_PACK)
    parts = {first: roomy(codes, torch.uint8)}
    parts["scales"] = roomy(scales, torch.float32 if wide else torch.bfloat16)
    if nested:
        parts["low"] = roomy(codes, torch.uint8)
    if not symmetric:
        parts["zeros"] = roomy(scales, torch.uint8)
    _native.encode_packed(
        _native.EncodeArgs(
            weight=weight.data_ptr(),
            source=SCALES[weight.dtype],
            stride=weight.stride(0),
            outputs=outputs,
            depth=depth,
            group=columns,
            nibbles=step == 8,
            asymmetric=not symmetric,
            wide_scales=wide,
            packed=parts[first].data_ptr(),
            scales=parts["scales"].data_ptr(),
            zeros=0 if symmetric else parts["zeros"].data_ptr(),
            low=parts["low"].data_ptr() if nested else 0,
        )
    )
    return QuantTensor(name, (outputs, depth), parts, "int8", "cpu")


def unpack(w: QuantTensor) -> QuantTensor:
    """The inverse of pack."""
    describe(w)  # for its checks
    columns, (key, packed) = _sizes(w)[3], _codes(w)
    codes = torch.empty(w.shape, dtype=torch.int8 if columns == 4 else packed.dtype)
    if (w.format, w.activations) == _NESTED:  # a view has only upper halves; its lower halves count as 0
        both = torch.full(w.shape, 8, dtype=torch.uint8)
        if "low" in w.parts:
            _native.unpack_codes(w.parts["low"].data_ptr(), both.data_ptr(), *w.shape, True)
        high = torch.empty_like(both)
        _native.unpack_codes(packed.data_ptr(), high.data_ptr(), *w.shape, True)
        key, codes = "codes" if "low" in w.parts else "high", ((high << 4 | both) - 136).view(torch.int8)
    elif columns == 2:
        _native.unpack_pairs(packed.data_ptr(), codes.data_ptr(), *w.shape, codes.element_size())
    else:
        _native.unpack_codes(packed.data_ptr(), codes.data_ptr(), *w.shape, columns == 8)
    if BLOCKS.get(w.format) == 5:
        _native.unpack_high(w.parts["high"].data_ptr(), codes.data_ptr(), *w.shape, 5)
    parts = {key: codes}
    for name in w.parts.keys() - {key, "high", "low", "nans"}:
        parts[name] = w.parts[name].transpose(1, 2).flatten(0, 1)[: w.shape[0]].contiguous()
    return replace(w, parts=parts, layout="plain")


def describe(w: QuantTensor) -> _native.Weight:
    """The native description of a packed weight.

    Raises ValueError or TypeError if the tensors are not as `pack` makes them: a kernel would read outside them.
    """
    if (w.format, w.activations) not in SERVED:
        raise ValueError(f"no packed weight is in {w.format} with activations {w.activations}; pack it again")
    depth, (name, codes) = w.shape[1], _codes(w)
    blocks, _, groups, _ = _sizes(w)
    wanted: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        name: (_codes_shape(w), (torch.bfloat16 if name == "weight" else torch.uint8,))
    }
    if "low" in w.parts:
        wanted["low"] = wanted[name]
    if name != "weight":
        wanted["scales"] = (blocks, groups, ROWS_PER_PACK), tuple(SCALES)
    if BLOCKS.get(w.format) == 5:
        wanted["high"] = _high_shape(w), (torch.uint8,)
    if w.format in BLOCKS and "least" in scheme.get(w.format).scale_parts:
        wanted["least"] = (blocks, groups, ROWS_PER_PACK), (w.parts["scales"].dtype,)
    marks = "nans" if w.format == "fp8_e4m3" else "zeros"
    if marks in w.parts:
        wanted[marks] = (blocks, groups, ROWS_PER_PACK), (torch.uint8,)
    for part, (shape, dtypes) in wanted.items():
        t = w.parts.get(part)
        if t is None or tuple(t.shape) != shape or not t.is_contiguous() or not t.is_cpu:
            got = None if t is None else tuple(t.shape)
            raise ValueError(f"{part} {got} of a packed weight {w.shape} in {w.format} must be {shape}; pack it again")
        if t.dtype not in dtypes:
            raise TypeError(f"{part} of a packed weight in {w.format} cannot be {t.dtype}; pack it again")
    if groups == 0 or depth % groups or depth > MAX_DEPTH or (groups > 1 and w.group % 32):
        raise ValueError(f"no kernel takes a packed weight {w.shape} with {groups} groups; pack it again")
    return native_weight(w, SERVED[w.format, w.activations], codes, zeros=w.parts.get(marks))


def native_weight(
    w: QuantTensor, code: int, codes: Tensor, stride: int = 0, zeros: Tensor | None = None
) -> _native.Weight:
    """The native description of a weight, with the addresses of its tensors. `stride`: elements between dense rows."""
    scales = w.parts.get("scales")

    def at(name: str) -> int:
        part = w.parts.get(name)
        return 0 if part is None else part.data_ptr()

    return _native.Weight(
        format=code,
        integer_rows=w.activations == "int8",
        bf16_rows=w.activations == "bf16",
        outputs=w.shape[0],
        depth=w.shape[1],
        group=w.group,
        stride=stride,
        codes=codes.data_ptr(),
        scales=at("scales"),
        scale_format=0 if scales is None else SCALES[scales.dtype],
        zeros=0 if zeros is None else zeros.data_ptr(),
        low=at("low"),
        high=at("high") if "codes" in w.parts else 0,
        steps=at("steps"),
        minima=at("minima"),
        least=at("least"),
    )
