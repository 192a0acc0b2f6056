"""Rows of the KV cache on the GPU: encoding as in the formats' `encode_kv`, with rotation if wanted, and moving."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from sameseed.batch import Batch
from sameseed.ops import reference
from sameseed.ops.triton.cached_rows import copy_rows, rotate_store, store
from sameseed.ops.triton.dispatch import rms_norm
from sameseed.ops.triton.guard import Launch, guarded
from sameseed.ops.triton.prepared import begins_early
from sameseed.ops.triton.rows import rotate
from sameseed.scheme import KVLayer

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}  # the largest code, for formats with scales
KINDS = {"fp32": "float", "bf16": "float", "fp16": "float", "int8": "int8", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
_CHUNK = 1024  # bytes of a row that one program of `copy_rows` takes


def heads_packed(x: Tensor) -> Tensor:
    """x [T, H, D] with the heads of a row contiguous; rows may be slices of wider rows. TypeError unless float32."""
    if x.dtype != torch.float32:
        raise TypeError(f"the triton backend computes in float32, not in {x.dtype}")
    packed = x.shape[0] == 0 or (x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1))
    return x if packed else x.contiguous()


def _places(layer: KVLayer) -> dict[str, Tensor]:
    return {
        "k_codes_ptr": layer.k,
        "v_codes_ptr": layer.v,
        "k_scale_ptr": layer.k if layer.k_scale is None else layer.k_scale,  # not touched without scales
        "v_scale_ptr": layer.v if layer.v_scale is None else layer.v_scale,
    }


def _constants(layer: KVLayer, dim: int) -> dict[str, Any]:
    half = max(16, triton.next_power_of_2(-(-dim // 2)))
    return {"KIND": KINDS[layer.format], "LARGEST": LARGEST.get(layer.format, 0.0), "DIM": dim, "BLOCK": half}


def storing(k: Tensor, v: Tensor, layer: KVLayer, slots: Tensor) -> Launch:
    """The launch of store_kv. Raises ValueError if keys do not fit the cache."""
    num_rows, heads, dim = k.shape
    if layer.k.shape[2:] != (heads, dim) or v.shape != k.shape:
        raise ValueError(f"keys {tuple(k.shape)} do not fit a cache {tuple(layer.k.shape)}")
    arguments: dict[str, Any] = {
        "k_ptr": k,
        "v_ptr": v,
        "k_stride": k.stride(0),
        "v_stride": v.stride(0),
        "slots_ptr": slots,
    }
    arguments |= {**_places(layer), "num_heads": heads}
    free = frozenset({"k_stride", "v_stride"})
    return Launch(store, (num_rows, heads), arguments, _constants(layer, dim), warps=1, free=free)


def rotating(q: Tensor, k: Tensor, v: Tensor, layer: KVLayer, batch: Batch, table: Tensor) -> tuple[Launch, Tensor]:
    """The launch of rope_store for q [T, H, D] and k, v [T, Hk, D] (heads of a row contiguous), and its output q."""
    num_rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    if layer.k.shape[2:] != (kv_heads, dim) or table.shape[1] != dim:
        raise ValueError(f"keys {tuple(k.shape)} do not fit a cache {tuple(layer.k.shape)}")
    out = torch.empty(num_rows, heads, dim, dtype=torch.float32, device=q.device)
    arguments: dict[str, Any] = {f"{name}_ptr": x for name, x in (("q", q), ("k", k), ("v", v))}
    arguments |= {f"{name}_stride": x.stride(0) for name, x in (("q", q), ("k", k), ("v", v))}
    arguments |= {"positions_ptr": batch.positions, "table_ptr": table, "slots_ptr": batch.slots, "out_ptr": out}
    arguments |= {**_places(layer), "num_heads": heads, "kv_heads": kv_heads}
    free = frozenset({"q_stride", "k_stride", "v_stride"})
    grid = (num_rows, heads + 2 * kv_heads)
    constants = {**_constants(layer, dim), "EARLY": begins_early(num_rows, q.device)}
    return Launch(rotate_store, grid, arguments, constants, warps=1, free=free), out


def moving(layer: KVLayer, src: Tensor, dst: Tensor) -> list[Launch]:
    """The two launches of move_kv: copy all rows to a buffer, then from it. Rows are bytes, so any format works.

    The tensors of `layer` may hold several layers along a first axis.
    """

    def as_bytes(x: Tensor) -> Tensor:
        return x.view(-1).view(torch.uint8)

    *stack, blocks, block_size, heads, _ = layer.k.shape
    num_layers, slots = math.prod(stack), blocks * block_size
    row_bytes = as_bytes(layer.k).numel() // (num_layers * slots)
    scale_bytes = 0 if layer.k_scale is None else 4 * heads
    buffer = torch.empty(
        num_layers * src.shape[0], 2 * (row_bytes + scale_bytes), dtype=torch.uint8, device=layer.k.device
    )
    scales = [as_bytes(x if y is None else y) for x, y in ((layer.k, layer.k_scale), (layer.v, layer.v_scale))]
    shared = {
        "k_ptr": as_bytes(layer.k),
        "v_ptr": as_bytes(layer.v),
        "k_scale_ptr": scales[0],
        "v_scale_ptr": scales[1],
        "buffer_ptr": buffer,
        "row_bytes": row_bytes,
        "scale_bytes": scale_bytes,
        "num_slots": slots,
    }
    constants = {"BLOCK": _CHUNK, "SCALE_BLOCK": triton.next_power_of_2(max(scale_bytes, 1)), "SCALED": scale_bytes > 0}
    grid = (src.shape[0], -(-row_bytes // _CHUNK), num_layers)
    return [
        Launch(copy_rows, grid, {**shared, "index_ptr": index}, {**constants, "OUT": out}, warps=2)
        for index, out in ((src, True), (dst, False))
    ]


def store_kv(k: Tensor, v: Tensor, layer: KVLayer, slots: Tensor) -> None:
    """Encode k, v [T, Hk, D] into cache rows `slots` [T], with the bits of the formats' `encode_kv`.

    Raises ValueError if they do not fit the cache, TypeError unless they are float32.
    """
    launch = storing(heads_packed(k), heads_packed(v), layer, slots)
    guarded(f"store_kv ({layer.format})", launch.run, lambda: reference.store_kv(k, v, layer, slots))


def move_kv(layer: KVLayer, src: Tensor, dst: Tensor) -> None:
    """Copy cache rows src [n] to dst [n]. All rows are read before any is written."""
    if not move_stacked(layer, src, dst):
        reference.move_kv(layer, src, dst)


def move_stacked(layers: KVLayer, src: Tensor, dst: Tensor) -> bool:
    """move_kv in all layers at once, along a first axis of the tensors. False if the kernel does not compile."""

    def kernel() -> bool:
        for launch in moving(layers, src, dst):
            launch.run()
        return True

    return guarded("move_kv", kernel, lambda: False)


def rope_store(
    qkv: Tensor,
    heads: int,
    layer: KVLayer,
    batch: Batch,
    table: Tensor,
    norms: tuple[Tensor, ...] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate q and k of qkv [T, (H + 2 Hk) D], store k and v in the cache, return q [T, H, D].

    Has the bits of `Ops.rope_store` in one launch. If q and k are normed per head, the launches of the norm come first.
    """
    q, k, v = map(heads_packed, reference.split_heads(qkv, heads, layer.k.shape[2], norms, eps, rms_norm))

    def kernel() -> Tensor:
        launch, out = rotating(q, k, v, layer, batch, table.contiguous())
        launch.run()
        return out

    def one_after_the_other() -> Tensor:
        store_kv(rope(k, batch.positions, table), v, layer, batch.slots)
        return rope(q, batch.positions, table)

    return guarded(f"rope_store ({layer.format})", kernel, one_after_the_other)


def rotation(x: Tensor, positions: Tensor, table: Tensor) -> tuple[Launch, Tensor]:
    """The launch of rope, and its output."""
    num_rows, heads, dim = x.shape
    out = torch.empty(num_rows, heads, dim, dtype=torch.float32, device=x.device)
    arguments = {
        "x_ptr": x,
        "positions_ptr": positions,
        "table_ptr": table,
        "out_ptr": out,
        "row_stride": x.stride(0),
        "num_heads": heads,
    }
    half = dim // 2
    block = max(16, 1 << (half - 1).bit_length())
    return Launch(rotate, (num_rows, heads), arguments, {"HALF": half, "BLOCK": block}, 1), out


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate x [T, H, D] by position (Su et al., 2021). table [P, D]: cosines, then sines.

    Positions are not checked against the table here; the batch bounds them.
    """

    def kernel() -> Tensor:
        launch, out = rotation(heads_packed(x), positions, table.contiguous())
        launch.run()
        return out

    return guarded("rope", kernel, lambda: reference.rope(x, positions, table))
