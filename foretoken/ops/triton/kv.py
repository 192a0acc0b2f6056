"""Rows of the KV cache on the GPU: encoded as the formats' `encode_kv` says, decoded as they are read, and moved.

A program of `store` sees one row of one head and nothing else: scales are per token and head, so that a rejected draft
leaves no trace.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.formats.scheme import KVLayer
from foretoken.ops import reference
from foretoken.ops.triton.guard import Launch, guarded

SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)  # formats.scheme.SMALLEST
ROUND: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # added and taken away, it rounds to nearest even

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}  # codes of formats with scales
KINDS = {"fp32": "float", "bf16": "float", "fp16": "float", "int8": "int8", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
KV_FORMATS = frozenset(KINDS)
_CHUNK = 1024  # bytes of a row that one program of `copy_rows` takes


@triton.jit
def as_numbers(raw, KIND: tl.constexpr):
    # Codes as the numbers they stand for, in float16, which holds all of them; floats as they are.
    if KIND == "e4m3":
        # Bits s eeee mmm under float16's exponent, times 2^(15 - 7). 0x7F is NaN.
        bits = raw.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        numbers = (half.to(tl.float32) * 256.0).to(tl.float16)
        numbers = tl.where((bits & 0x7F) == 0x7F, float("nan"), numbers).to(tl.float16)
    elif KIND == "e5m2":
        numbers = (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif KIND == "int8":
        numbers = raw.to(tl.float16)
    else:
        numbers = raw
    return numbers


@triton.jit
def _float8(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    # Bits of the 8-bit float nearest to y, to even; |y| must not lie beyond the largest one.
    TINY: tl.constexpr = 1 - BIAS - MANTISSA  # a subnormal's step, as a power of two
    exponent = y.to(tl.int32, bitcast=True) & 0x7F800000
    step = tl.maximum(exponent - (MANTISSA << 23), (127 + TINY) << 23).to(tl.float32, bitcast=True) * ROUND
    y = (y + step) - step
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    subnormal = (tl.abs(y) * (2.0 ** (-TINY))).to(tl.int32)
    code = tl.where(size >= ((128 - BIAS) << 23), normal, subnormal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _encode_row(x, codes_at, scale_at, inside, KIND: tl.constexpr, LARGEST: tl.constexpr):
    # One row [BLOCK] of one head into its place.
    if KIND == "float":
        tl.store(codes_at, x.to(codes_at.dtype.element_ty), mask=inside)
    else:
        finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=0) == 1
        a = tl.max(tl.abs(x), axis=0)
        usable = finite & (a >= SMALLEST)
        a = tl.where(usable, a, 1.0)
        y = x * tl.div_rn(LARGEST, a)
        if KIND == "int8":
            y = (y + ROUND) - ROUND
        y = tl.where(usable, tl.minimum(tl.maximum(y, -LARGEST), LARGEST), 0.0)
        if KIND == "int8":
            codes = y.to(tl.int8)
        elif KIND == "e4m3":
            codes = _float8(y, 3, 7)
        else:
            codes = _float8(y, 2, 15)
        tl.store(codes_at, codes, mask=inside)
        tl.store(scale_at, tl.where(usable, tl.div_rn(a, LARGEST), tl.where(finite, 0.0, float("nan"))))


@triton.jit(do_not_specialize=["k_stride", "v_stride"])
def store(
    k_ptr,
    v_ptr,
    k_stride,
    v_stride,
    slots_ptr,
    k_codes_ptr,
    v_codes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_heads,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Row t, head h: its key and its value.
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < DIM
    place = tl.load(slots_ptr + t).to(tl.int64) * num_heads + h
    k = tl.load(k_ptr + t * k_stride + h * DIM + cols, mask=inside, other=0.0)
    v = tl.load(v_ptr + t * v_stride + h * DIM + cols, mask=inside, other=0.0)
    _encode_row(k, k_codes_ptr + place * DIM + cols, k_scale_ptr + place, inside, KIND, LARGEST)
    _encode_row(v, v_codes_ptr + place * DIM + cols, v_scale_ptr + place, inside, KIND, LARGEST)


@triton.jit(do_not_specialize=["num_moves"])
def copy_rows(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, index_ptr, buffer_ptr, num_moves, row_bytes, scale_bytes,
    OUT: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr,
):  # fmt: skip
    # Cache row index[i] to row i of the buffer (OUT), or back. A buffer row: key, value, and their scales.
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(index_ptr + i).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < row_bytes
    row = buffer_ptr + i * (2 * (row_bytes + scale_bytes))
    keys, values = k_ptr + slot * row_bytes + cols, v_ptr + slot * row_bytes + cols
    if OUT:
        tl.store(row + cols, tl.load(keys, mask=inside), mask=inside)
        tl.store(row + row_bytes + cols, tl.load(values, mask=inside), mask=inside)
    else:
        tl.store(keys, tl.load(row + cols, mask=inside), mask=inside)
        tl.store(values, tl.load(row + row_bytes + cols, mask=inside), mask=inside)
    if SCALED and tl.program_id(1) == 0:
        at = tl.arange(0, SCALE_BLOCK)
        there = at < scale_bytes
        theirs, ours = row + 2 * row_bytes + at, slot * scale_bytes + at
        if OUT:
            tl.store(theirs, tl.load(k_scale_ptr + ours, mask=there), mask=there)
            tl.store(theirs + scale_bytes, tl.load(v_scale_ptr + ours, mask=there), mask=there)
        else:
            tl.store(k_scale_ptr + ours, tl.load(theirs, mask=there), mask=there)
            tl.store(v_scale_ptr + ours, tl.load(theirs + scale_bytes, mask=there), mask=there)


def heads_packed(x: Tensor) -> Tensor:
    """x [T, H, D] float32 with the heads of a row side by side; rows may be slices of wider ones."""
    if x.dtype != torch.float32:
        raise TypeError(f"the triton backend computes in float32, not in {x.dtype}")
    packed = x.shape[0] == 0 or (x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1))
    return x if packed else x.contiguous()


def storing(k: Tensor, v: Tensor, layer: KVLayer, slots: Tensor) -> Launch:
    """The launch of store_kv."""
    num_rows, heads, dim = k.shape
    if layer.k.shape[2:] != (heads, dim) or v.shape != k.shape:
        raise ValueError(f"keys {tuple(k.shape)} do not fit a cache {tuple(layer.k.shape)}")
    arguments = {
        "k_ptr": k,
        "v_ptr": v,
        "k_stride": k.stride(0),
        "v_stride": v.stride(0),
        "slots_ptr": slots,
        "k_codes_ptr": layer.k,
        "v_codes_ptr": layer.v,
        "k_scale_ptr": layer.k if layer.k_scale is None else layer.k_scale,  # not read without scales
        "v_scale_ptr": layer.v if layer.v_scale is None else layer.v_scale,
        "num_heads": heads,
    }
    constants = {
        "KIND": KINDS[layer.format],
        "LARGEST": LARGEST.get(layer.format, 0.0),
        "DIM": dim,
        "BLOCK": max(16, triton.next_power_of_2(dim)),
    }
    free = frozenset({"k_stride", "v_stride"})
    return Launch(store, (num_rows, heads), arguments, constants, warps=1, free=free)


def moving(layer: KVLayer, src: Tensor, dst: Tensor) -> list[Launch]:
    """The two launches of move_kv: all rows into a buffer, then out of it. Of any format: rows are bytes."""

    def as_bytes(x: Tensor) -> Tensor:
        return x.view(-1).view(torch.uint8)

    slots = layer.k.shape[0] * layer.k.shape[1]
    row_bytes = as_bytes(layer.k).numel() // slots
    scale_bytes = 0 if layer.k_scale is None else 4 * layer.k.shape[2]
    buffer = torch.empty(src.shape[0], 2 * (row_bytes + scale_bytes), dtype=torch.uint8, device=layer.k.device)
    scales = [as_bytes(x if y is None else y) for x, y in ((layer.k, layer.k_scale), (layer.v, layer.v_scale))]
    shared = {
        "k_ptr": as_bytes(layer.k),
        "v_ptr": as_bytes(layer.v),
        "k_scale_ptr": scales[0],
        "v_scale_ptr": scales[1],
        "buffer_ptr": buffer,
        "num_moves": src.shape[0],
        "row_bytes": row_bytes,
        "scale_bytes": scale_bytes,
    }
    blocks = {"BLOCK": _CHUNK, "SCALE_BLOCK": triton.next_power_of_2(max(scale_bytes, 1)), "SCALED": scale_bytes > 0}
    grid, free = (src.shape[0], -(-row_bytes // _CHUNK)), frozenset({"num_moves"})
    return [
        Launch(copy_rows, grid, {**shared, "index_ptr": index}, {**blocks, "OUT": out}, warps=2, free=free)
        for index, out in ((src, True), (dst, False))
    ]


def store_kv(k: Tensor, v: Tensor, layer: KVLayer, slots: Tensor) -> None:
    """Encode k, v [T, Hk, D] into the cache rows slots [T]; bit for bit the formats' `encode_kv`.

    Raises ValueError where they do not fit the cache, TypeError unless they are float32.
    """
    launch = storing(heads_packed(k), heads_packed(v), layer, slots)
    guarded(f"store_kv ({layer.format})", launch.run, lambda: reference.store_kv(k, v, layer, slots))


def move_kv(layer: KVLayer, src: Tensor, dst: Tensor) -> None:
    """Copy cache rows src [n] to dst [n]; all are read before any is written."""

    def kernel() -> None:
        for launch in moving(layer, src, dst):
            launch.run()

    guarded("move_kv", kernel, lambda: reference.move_kv(layer, src, dst))
