"""Ops of the CPU backend on caches and recurrent states: they check shapes and types and call the native kernels."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.errors import ConfigError
from sameseed.ops._layout import native
from sameseed.ops._native_rows import DTYPES, F32, NOW, Executor, check_fit, described, floats, ints, vector
from sameseed.ops._rows import DeltaWeights, StateLayer
from sameseed.scheme import KVLayer

with suppress(ImportError):  # cpu.py then says that the module is missing
    from sameseed import _native

_KV = {  # enum KvFormat in csrc/kernels.h, and the type of a code
    "fp32": (0, torch.float32),
    "bf16": (1, torch.bfloat16),
    "fp16": (2, torch.float16),
    "int8": (3, torch.int8),
    "fp8_e4m3": (4, torch.uint8),
    "fp8_e5m2": (5, torch.uint8),
    "int4": (6, torch.uint8),
    "int4_sparse": (7, torch.uint8),
    "bf16_a16": (8, torch.bfloat16),
    "int8_a8": (9, torch.int8),
}
_SCALED = frozenset(_KV) - DTYPES.keys() - {"bf16_a16"}
KV_FORMATS = frozenset(_KV)
_MAX_DIM = 512  # max_dim in csrc/kernels.h
_NO_WINDOW = 1 << 40


@cache
def _head_dim(code: int, width: int) -> int:
    """Head dimension of rows of `width` elements in a cache with this format code. Raises ValueError if none fits."""
    if code not in (_KV["int4"][0], _KV["int4_sparse"][0]):
        return width
    for dim in range(2, _MAX_DIM + 1, 2):
        if _native.kv_row_bytes(code, dim) == width:
            return dim
    raise ValueError(f"no head dimension up to {_MAX_DIM} has rows of {width} bytes in this cache")


def _cache(layer: KVLayer) -> _native.Cache:
    k, v = layer.k, layer.v
    code, dtype = _KV[layer.format]
    if k.dtype is not dtype or v.dtype is not dtype or not k.is_contiguous() or not v.is_contiguous():
        raise TypeError(f"a KV cache in {layer.format} must be contiguous {dtype} tensors")
    check_fit("v", v.shape, k.shape)
    num_blocks, block_size, kv_heads, width = k.shape
    scales = (layer.k_scale, layer.v_scale) if layer.format in _SCALED else ()
    for scale in scales:
        if scale is None or scale.dtype is not F32 or not scale.is_contiguous():
            raise TypeError(f"scales of a KV cache in {layer.format} must be contiguous float32 tensors")
        check_fit("scales", scale.shape, k.shape[:3])
    shape = {"num_slots": num_blocks * block_size, "kv_heads": kv_heads, "dim": _head_dim(code, width), "format": code}
    k_scale, v_scale = scales or (None, None)
    return native(_native.Cache, k=k, v=v, k_scale=k_scale, v_scale=v_scale, **shape)


def store_kv(k: Tensor, v: Tensor, layer: KVLayer, slots: Tensor) -> None:
    """Encode k, v [T, Hk, D] into cache rows `slots` [T], rounding to nearest even.

    Scales are per row and head, as in the formats' `encode_kv`. Raises IndexError for slots outside the cache.
    """
    k, v, slots = floats(k), floats(v), ints(slots)
    check_fit("k", k.shape, (slots.shape[0], layer.k.shape[2], _head_dim(_KV[layer.format][0], layer.k.shape[3])))
    check_fit("v", v.shape, k.shape)
    native(_native.store_kv, k, k.stride(0), v, v.stride(0), described(_cache, layer), slots, k.shape[0])


def rope_store(
    qkv: Tensor,
    heads: int,
    layer: KVLayer,
    batch: Batch,
    table: Tensor,
    norms: tuple[Tensor, ...] | None = None,
    eps: float = 0.0,
    stores: bool = True,
    on: Executor = NOW,
) -> Tensor:
    """Rotate q and k of qkv [T, (H + 2 Hk) D], store k and v in the cache, return q [T, H, D] (`Ops.rope_store`).

    The bits are those of rms_norm, rope and store_kv, and it raises the same errors.
    """
    qkv, positions, slots = floats(qkv), ints(batch.positions), ints(batch.slots)
    kv_heads, dim = layer.k.shape[2] * stores, _head_dim(_KV[layer.format][0], layer.k.shape[3])
    rows = qkv.shape[0]
    check_fit("qkv", qkv.shape[1], (heads + 2 * kv_heads) * dim)
    check_fit(
        "rope table, positions and slots", (table.shape[1], positions.shape[0], slots.shape[0]), (dim, rows, rows)
    )
    q_norm, k_norm, v_norm = (vector("norm weights", x, dim) for x in (*(norms or ()), None, None, None)[:3])
    table = table.contiguous()
    out = on.empty(rows, heads, dim)
    norm_weights = {"q_norm": q_norm, "k_norm": k_norm, "v_norm": v_norm, "eps": eps}
    where = {"positions": positions, "table": table, "table_rows": table.shape[0], "slots": slots}
    fields = {"qkv": qkv, "stride": qkv.stride(0), "heads": heads, "stores": stores, "q_out": out, "rows": rows}
    on.calls.rope_store(native(_native.RopeStore, cache=described(_cache, layer), **fields, **where, **norm_weights))
    return out


def move_kv(layer: KVLayer, src: Tensor, dst: Tensor) -> None:
    """Copy cache rows src [n] to dst [n]. All rows are read before any is written."""
    src, dst = ints(src), ints(dst)
    check_fit("targets", dst.shape, src.shape)
    native(_native.move_kv, described(_cache, layer), src, dst, src.shape[0])


def attention_rounding(name: str) -> float:
    """Error from rounding softmax weights, relative to the largest value; see `Ops.kv_rounding`.

    In bf16: 2^-8 of each weight. As integers up to 32767: half a step for each of the 256 weights of a block.
    """
    return 2.0**-8 if name in ("bf16_a16", "int8_a8") else 0.0


def attention(
    q: Tensor,
    layer: KVLayer,
    batch: Batch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    on: Executor = NOW,
) -> Tensor:
    """Grouped-query attention of q [T, H, D] over the paged cache; returns [T, H, D]. Causal, with trees and a window.

    Raises IndexError or ValueError if offsets, blocks, positions or masks are inconsistent.
    """
    q = floats(q)
    rows, heads, dim = q.shape
    _, block_size, kv_heads, width = layer.k.shape
    depth = _head_dim(_KV[layer.format][0], width)
    if depth != dim or heads % kv_heads or dim > _MAX_DIM:
        shapes = f"q {tuple(q.shape)} does not fit a cache {tuple(layer.k.shape)}"
        raise ValueError(f"{shapes} (head dim at most {_MAX_DIM})")
    positions = ints(batch.positions if batch.key_positions is None else batch.key_positions)
    offsets, kv_lens, tables = map(ints, (batch.row_offsets, batch.kv_lens, batch.block_tables))
    mask, (num_seqs, table_stride) = batch.tree_mask, tables.shape
    if (len(positions), len(offsets), len(kv_lens)) != (rows, num_seqs + 1, num_seqs):
        raise ValueError(f"q has {rows} rows; the batch {len(positions)} rows, {num_seqs} block tables")
    if mask is not None and (mask.dtype is not torch.int64 or mask.shape[0] != rows or not mask.is_contiguous()):
        raise ValueError("tree_mask must be contiguous int64 [T]")
    shape = {"count": num_seqs, "table_stride": table_stride, "rows": rows}
    sequences = native(_native.Sequences, row_offsets=offsets, kv_lens=kv_lens, block_tables=tables, **shape)
    out, sinks = on.empty(rows, heads, dim), vector("sinks", sinks, heads)
    where = {"cache": described(_cache, layer), "block_size": block_size, "sequences": sequences}
    seen = {"positions": positions, "tree_mask": mask, "window": _NO_WINDOW if window is None else window}
    fields = {"q": q, "stride": q.stride(0), "heads": heads, "scale": scale, "sinks": sinks, "out": out}
    on.calls.attention(native(_native.Attention, **fields, **where, **seen))
    return out


def take(x: Tensor, index: Tensor, on: Executor = NOW) -> Tensor:
    """Columns `index` int32 [n] of x [T, K], in this order: [T, n]."""
    x, index = floats(x), ints(index)
    out = on.empty(x.shape[0], len(index))
    fields = {"x": x, "stride": x.stride(0), "index": index, "width": len(index), "out": out, "rows": x.shape[0]}
    on.calls.take(native(_native.Take, **fields))
    return out


def gate(x: Tensor, gates: Tensor, heads: int, on: Executor = NOW) -> Tensor:
    """x [T, H D] times the sigmoid of its heads' gates, the last D columns of each head of gates [T, ...]."""
    x, gates = floats(x), floats(gates)
    rows, dim, apart = x.shape[0], x.shape[1] // heads, gates.shape[1] // heads
    out = on.empty(rows, heads * dim)
    first = gates.data_ptr() + (apart - dim) * gates.element_size()
    shape = {"heads": heads, "dim": dim, "apart": apart, "rows": rows, "out": out}
    on.calls.gate(native(_native.SigmoidGate, x=x, gate=first, stride=gates.stride(0), **shape))
    return out


def conv(x: Tensor, w: Tensor, layer: StateLayer, batch: Batch, on: Executor = NOW) -> Tensor:
    """A short convolution of rows x, as `reference.conv`. Raises IndexError for rows that do not fit the log."""
    x, (taps, width), (slots, log_rows, kept) = floats(x), w.shape, layer.log.shape
    check_fit("rows", x.shape[1], 3 * width)
    check_fit("log", kept, width)
    offsets, positions = ints(batch.row_offsets), ints(batch.positions)
    out = on.empty(x.shape[0], width)
    where = {"x": x, "stride": x.stride(0), "weight": w, "taps": taps, "width": width, "out": out, "rows": x.shape[0]}
    where |= {"log": layer.log, "slots": slots, "log_rows": log_rows, "states": batch.states}
    where |= {"row_offsets": offsets, "positions": positions, "num_seqs": len(offsets) - 1}
    on.calls.conv(native(_native.ShortConv, **where))
    return out


def delta(x: Tensor, w: DeltaWeights, layer: StateLayer, batch: Batch, on: Executor = NOW) -> Tensor:
    """Gated DeltaNet of rows x, as `reference.delta`. Raises IndexError for rows that do not fit the states."""
    x = floats(x)
    (slots, heads, depth, dim), (taps, width) = layer.state.shape, w.conv.shape
    check_fit("rows", x.shape[1], width + heads * dim + 2 * heads)
    check_fit("log", layer.log.shape[2], width + 2 * heads)
    if dim % 16 or depth % 2 or (width - heads * dim) % (2 * depth) or taps > 8:
        raise ConfigError(f"no kernel has states of {depth} x {dim} and {taps} columns; use --backend reference")
    offsets, positions, states = ints(batch.row_offsets), ints(batch.positions), batch.states
    out = on.empty(x.shape[0], 2 * heads * dim)
    weights = {"conv": w.conv, "decay": w.decay, "bias": w.bias, "norm": w.norm, "eps": w.eps, "tiled": w.tiled}
    kept = {"state": layer.state, "log": layer.log, "slots": slots, "log_rows": layer.log.shape[1], "states": states}
    sizes = {"taps": taps, "key_heads": (width - heads * dim) // (2 * depth), "value_heads": heads}
    sizes |= {"key_dim": depth, "value_dim": dim, "num_seqs": len(offsets) - 1, "rows": x.shape[0]}
    where = {"x": x, "stride": x.stride(0), "row_offsets": offsets, "positions": positions, "out": out}
    on.calls.delta(native(_native.DeltaRule, **where, **weights, **kept, **sizes))
    return out
