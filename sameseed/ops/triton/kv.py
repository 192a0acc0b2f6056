"""Rows of the KV cache on the GPU: encoding as in the formats' `encode_kv`, with rotation if wanted, and moving."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from sameseed.batch import Batch
from sameseed.ops import reference
from sameseed.ops.triton.cached_rows import copy_rows, rotate_store
from sameseed.ops.triton.dispatch import rms_norm
from sameseed.ops.triton.guard import Launch, guarded
from sameseed.ops.triton.prepared import begins_early
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


def turning(
    q: Tensor | None, stored: tuple[Tensor, Tensor, KVLayer, Tensor] | None, turn: tuple[Tensor, Tensor] | None
) -> tuple[Launch, Tensor]:
    """The launch that rotates queries q [T, H, D], and rotates and stores keys and values; and the rotated queries.

    stored: keys and values [T, Hk, D] (heads of a row contiguous), their cache and slots. turn: positions and table, or
    None: keys are stored as they are. Raises ValueError if keys do not fit the cache.
    """
    x = q if stored is None else stored[0]
    assert x is not None
    (num_rows, _, dim), heads, kv_heads = x.shape, 0 if q is None else q.shape[1], 0 if stored is None else x.shape[1]
    out = torch.empty(num_rows, heads, dim, dtype=torch.float32, device=x.device)
    # A tensor that there is not is replaced by another one, which the kernel never uses.
    k, v, layer, slots = stored or (x, x, None, x if turn is None else turn[0])
    positions, table = turn or (slots, x)
    if layer is not None and (layer.k.shape[2:] != k.shape[1:] or v.shape != k.shape):
        raise ValueError(f"keys {tuple(k.shape)} do not fit a cache {tuple(layer.k.shape)}")
    if turn is not None and table.shape[1] != dim:
        raise ValueError(f"a rope table {tuple(table.shape)} does not fit heads of {dim}")
    rows = {"q": x if q is None else q, "k": k, "v": v}
    arguments: dict[str, Any] = {f"{name}_ptr": t for name, t in rows.items()}
    arguments |= {f"{name}_stride": t.stride(0) for name, t in rows.items()}
    arguments |= {"positions_ptr": positions, "table_ptr": table, "slots_ptr": slots, "out_ptr": out}
    codes = (out, out) if layer is None else (layer.k, layer.v)
    scales = (None, None) if layer is None else (layer.k_scale, layer.v_scale)
    for name, code, scale in zip("kv", codes, scales, strict=True):
        arguments |= {f"{name}_codes_ptr": code, f"{name}_scale_ptr": code if scale is None else scale}
    arguments |= {"num_heads": heads, "kv_heads": kv_heads}
    name = "fp32" if layer is None else layer.format
    half = max(16, triton.next_power_of_2(-(-dim // 2)))
    constants = {"KIND": KINDS[name], "LARGEST": LARGEST.get(name, 0.0), "DIM": dim, "BLOCK": half}
    constants |= {"ROTATED": turn is not None, "EARLY": begins_early(num_rows, x.device)}
    free = frozenset({"q_stride", "k_stride", "v_stride"})
    return Launch(rotate_store, (num_rows, heads + 2 * kv_heads), arguments, constants, warps=1, free=free), out


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
    launch, _ = turning(None, (heads_packed(k), heads_packed(v), layer, slots), None)
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
        launch, out = turning(q, (k, v, layer, batch.slots), (batch.positions, table.contiguous()))
        launch.run()
        return out

    def one_after_the_other() -> Tensor:
        store_kv(rope(k, batch.positions, table), v, layer, batch.slots)
        return rope(q, batch.positions, table)

    return guarded(f"rope_store ({layer.format})", kernel, one_after_the_other)


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate x [T, H, D] by position (Su et al., 2021). table [P, D]: cosines, then sines.

    Positions are not checked against the table here; the batch bounds them.
    """

    def kernel() -> Tensor:
        launch, out = turning(heads_packed(x), None, (positions, table.contiguous()))
        launch.run()
        return out

    return guarded("rope", kernel, lambda: reference.rope(x, positions, table))
