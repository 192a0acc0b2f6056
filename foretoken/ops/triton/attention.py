"""Attention over the paged cache on the GPU (blockwise softmax: Milakov and Gimelshein, 2018; Dao et al., 2022, 2023).

What a program does, and why a row's bits do not depend on its company: attend.py.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from foretoken.batch import Batch
from foretoken.formats.scheme import KVLayer
from foretoken.ops import reference
from foretoken.ops.triton.attend import attend, combine
from foretoken.ops.triton.guard import Launch, guarded, interpreted
from foretoken.ops.triton.kv import KINDS, LARGEST, heads_packed

KEYS = 64  # keys of a block
SPAN = 512  # keys of a span: what one program takes where spans are shared out
ENOUGH = 264  # programs that keep a large GPU busy without sharing spans out; chosen without a GPU at hand
PARTS_BYTES = 256 << 20  # the most that spans which are shared out may take
LOG2_E = 1.4426950408889634
NO_WINDOW = 1 << 30


def attention_rounding(name: str) -> float:
    """What two terms of a cache's type lose of queries and weights, over the largest value: see `Ops.kv_rounding`."""
    return 1e-4 if name == "bf16" else 0.0  # 16 bits; two of float16 or float32 hold more than the sums


@cache
def _no_tree(device: torch.device) -> Tensor:
    """What stands for the masks of a pass without a draft: one kernel serves both, so that bits cannot differ."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def shared_out(num_rows: int, programs: int, num_heads: int, num_spans: int, dim: int) -> bool:
    """Whether each span of keys has a program of its own: where few programs would walk many spans. Bits are the same.

    `programs`: how many there are without; the parts [num_rows, num_heads, num_spans, dim] must not take too much.
    """
    return num_spans > 1 and programs < ENOUGH and 4 * num_rows * num_heads * num_spans * dim <= PARTS_BYTES


def launches(
    q: Tensor, layer: KVLayer, batch: Batch, scale: float, window: int | None, out: Tensor, split: bool | None = None
) -> list[Launch]:
    """The launches of attention into `out` [T, H, D]; `split`: share spans out or not (None: `shared_out` decides)."""
    num_rows, num_heads, dim = q.shape
    _, page, kv_heads, width = layer.k.shape
    if width != dim or num_heads % kv_heads:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a cache {tuple(layer.k.shape)}")
    group = num_heads // kv_heads
    heads = min(16, triton.next_power_of_2(group))
    table = batch.block_tables.contiguous()
    num_spans = max(1, -(-table.shape[1] * page // SPAN))
    grid = (num_rows // (16 // heads) + batch.num_seqs, kv_heads * -(-group // heads))
    if split is None:
        split = shared_out(num_rows, grid[0] * grid[1], num_heads, num_spans, dim)
    part = torch.empty((num_rows, num_heads, num_spans, dim) if split else (1,), dtype=torch.float32, device=q.device)
    sums = torch.empty((num_rows, num_heads, num_spans, 2) if split else (1,), dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(dim))
    arguments = {
        "q_ptr": q,
        "k_ptr": layer.k,
        "v_ptr": layer.v,
        "k_scale_ptr": out if layer.k_scale is None else layer.k_scale,  # not read without scales
        "v_scale_ptr": out if layer.v_scale is None else layer.v_scale,
        "out_ptr": out,
        "part_ptr": part,
        "sums_ptr": sums,
        "positions_ptr": batch.positions if batch.key_positions is None else batch.key_positions,
        "offsets_ptr": batch.row_offsets,
        "num_pending_ptr": batch.num_pending,
        "kv_lens_ptr": batch.kv_lens,
        "table_ptr": table,
        "tree_ptr": _no_tree(q.device) if batch.tree_mask is None else batch.tree_mask,
        "num_seqs": batch.num_seqs,
        "has_tree": int(batch.tree_mask is not None),
        "q_stride": q.stride(0),
        "num_spans": num_spans,
        "table_width": table.shape[1],
        "scale": scale * LOG2_E,
        "window": NO_WINDOW if window is None else min(window, NO_WINDOW),
        "num_heads": num_heads,
        "kv_heads": kv_heads,
        "group": group,
    }
    constants = {
        "WHOLE": not split,
        "KIND": KINDS[layer.format],
        "SCALED": layer.format in LARGEST,
        "SPLIT": layer.format != "fp32",
        "WIDEN": interpreted() and layer.format == "bf16",
        "PAGE": page,
        "DIM": dim,
        "BLOCK_D": block_d,
        "HEADS": heads,
        "KEYS": KEYS,
        "SPAN": SPAN,
    }
    free = frozenset({"num_seqs", "has_tree", "q_stride", "num_spans", "table_width"})
    first = Launch(attend, (*grid, num_spans if split else 1), arguments, constants, warps=4, stages=2, free=free)
    if not split:
        return [first]
    kept = {name: arguments[name] for name in ("part_ptr", "sums_ptr", "out_ptr", "num_spans", "num_heads")}
    rest = {"DIM": dim, "BLOCK_D": block_d}
    return [first, Launch(combine, (num_rows, -(-num_heads // 16)), kept, rest, warps=4, free=free)]


def attention(q: Tensor, layer: KVLayer, batch: Batch, scale: float, window: int | None = None) -> Tensor:
    """Grouped-query attention of q [T, H, D] over the paged cache; returns [T, H, D]. Causal, with trees and a window.

    Queries and weights enter products in two terms of the cache's type (16 bits of them for bf16, 22 else), or as
    float32 for fp32. Raises ValueError where q does not fit the cache, TypeError unless it is float32.
    """
    packed = heads_packed(q)

    def kernel() -> Tensor:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        for launch in launches(packed, layer, batch, scale, window, out):
            launch.run()
        return out

    name = f"attention ({layer.format})"
    return guarded(name, kernel, lambda: reference.attention(q, layer, batch, scale, window))
