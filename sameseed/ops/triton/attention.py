"""Attention over the paged cache on the GPU (blockwise softmax: Milakov and Gimelshein, 2018; Dao et al., 2022, 2023).

attend.py explains what a program does, and why a row's bits do not depend on other rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from sameseed.batch import Batch
from sameseed.errors import say_once
from sameseed.ops import reference
from sameseed.ops.triton.attend import attend
from sameseed.ops.triton.guard import Launch, guarded, interpreted
from sameseed.ops.triton.kv import KINDS, LARGEST, heads_packed
from sameseed.ops.triton.prepared import begins_early, converts_fp8
from sameseed.ops.triton.softmax import AT_ONCE, combine
from sameseed.ops.triton.tiling import MULTIPROCESSORS
from sameseed.scheme import KVLayer

KEYS = 64  # keys per block
STAGES = 3  # pipeline stages of the loop over blocks; five or seven need more registers and were slower on an H200
SPAN = 2 * KEYS  # keys per span, the smallest part of the keys that a program takes
STRETCH = AT_ONCE.value * SPAN  # keys per stretch, the part that a program takes if contexts are long
FEW = MULTIPROCESSORS  # one program for each multiprocessor of a large GPU
ENOUGH = 8 * FEW  # eight programs for each, which balances the load
PARTS_BYTES = 256 << 20  # upper limit of the memory for partial results
LOG2_E = 1.4426950408889634
NO_WINDOW = 1 << 30


def attention_rounding(name: str) -> float:
    """Error from splitting queries and weights into two terms, relative to the largest value; see `Ops.kv_rounding`."""
    return 1e-4 if name == "bf16" else 0.0  # two bf16 terms hold 16 bits; float16 and float32 are better than the sums


@cache
def _no_tree(device: torch.device) -> Tensor:
    """A placeholder for the tree masks of a pass without drafts. One kernel serves both, so bits cannot differ."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def walk(num_rows: int, programs: int, num_heads: int, num_keys: int, dim: int) -> str:
    """The part of the keys that a program takes: a "span", a "stretch", or "all". The choice changes no bits.

    `programs`: the number of programs if each takes all keys. Partial results must not exceed PARTS_BYTES.
    """
    stretches = -(-num_keys // STRETCH)

    def fits(count: int) -> bool:
        return 4 * num_rows * num_heads * count * (dim + 2) <= PARTS_BYTES

    if programs * stretches < FEW and num_keys > SPAN and fits(-(-num_keys // SPAN)):
        return "span"
    return "stretch" if stretches > 1 and programs < ENOUGH and fits(stretches) else "all"


def _inputs(
    q: Tensor, layer: KVLayer, batch: Batch, scale: float, window: int | None, unread: Tensor
) -> dict[str, Any]:
    """The inputs of attention except the block table. `unread` replaces scales that the cache does not have."""
    coded = layer.format in LARGEST
    return {
        "q_ptr": q,
        "k_ptr": layer.k.view(torch.int16) if coded else layer.k,
        "v_ptr": layer.v.view(torch.int16) if coded else layer.v,
        "k_scale_ptr": unread if layer.k_scale is None else layer.k_scale,
        "v_scale_ptr": unread if layer.v_scale is None else layer.v_scale,
        "positions_ptr": batch.positions if batch.key_positions is None else batch.key_positions,
        "offsets_ptr": batch.row_offsets,
        "num_pending_ptr": batch.num_pending,
        "kv_lens_ptr": batch.kv_lens,
        "tree_ptr": _no_tree(q.device) if batch.tree_mask is None else batch.tree_mask,
        "num_seqs": batch.num_seqs,
        "has_tree": int(batch.tree_mask is not None),
        "q_stride": q.stride(0),
        "scale": scale * LOG2_E,
        "window": NO_WINDOW if window is None else min(window, NO_WINDOW),
    }


def _arithmetic(layer: KVLayer, device: torch.device) -> dict[str, Any]:
    """The kernel constants that depend on the cache's format and the device, and those that fix the order of sums."""
    return {
        "KIND": KINDS[layer.format],
        "SCALED": layer.format in LARGEST,
        "SPLIT": layer.format != "fp32",
        "HALVES": layer.format == "fp16",
        "WIDEN": interpreted() and layer.format == "bf16",
        "MACHINE": not interpreted(),
        "FLOAT8": converts_fp8(device),
        "KEYS": KEYS,
        "SPAN": SPAN,
        "STRETCH": STRETCH,
    }


def launches(
    q: Tensor, layer: KVLayer, batch: Batch, scale: float, window: int | None, out: Tensor, taken: str | None = None
) -> list[Launch]:
    """The launches of attention into `out` [T, H, D]. `taken`: the part that a program takes (None: `walk` decides).

    Raises ValueError if q does not fit the cache, or if heads have odd dimensions and codes have 8 bits.
    """
    num_rows, num_heads, dim = q.shape
    page, kv_heads, width = layer.k.shape[1:]
    if width != dim or num_heads % kv_heads:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a cache {tuple(layer.k.shape)}")
    if layer.format in LARGEST and dim % 2:
        raise ValueError(f"8-bit codes are read in pairs, and heads of {dim} have none; use a KV cache in bf16")
    group = num_heads // kv_heads
    heads = min(16, triton.next_power_of_2(group))
    table = batch.block_tables.contiguous()
    num_keys = table.shape[1] * page
    grid = (num_rows // (16 // heads) + batch.num_seqs, kv_heads * -(-group // heads))
    taken = walk(num_rows, grid[0] * grid[1], num_heads, num_keys, dim) if taken is None else taken
    num_parts = max(1, -(-num_keys // {"span": SPAN, "stretch": STRETCH, "all": max(1, num_keys)}[taken]))
    parts = (num_rows, num_heads, num_parts) if taken != "all" else (1, 1, 1)
    part, sums = (torch.empty(*parts, n, dtype=torch.float32, device=q.device) for n in (dim, 2))
    shape = {"table_ptr": table, "table_width": table.shape[1], "kv_heads": kv_heads, "group": group}
    inputs = {**_inputs(q, layer, batch, scale, window, out), **shape}
    results = {
        "out_ptr": out,
        "part_ptr": part,
        "sums_ptr": sums,
        "bounds_ptr": torch.empty(num_rows, 2, dtype=torch.int32, device=q.device),
        "num_parts": num_parts,
        "num_heads": num_heads,
    }
    half = max(16, triton.next_power_of_2(-(-dim // 2)))
    sizes = {"WALK": taken, "PAGE": page, "DIM": dim, "BLOCK": half, "HEADS": heads}
    free = frozenset({"num_seqs", "has_tree", "q_stride", "num_parts", "table_width"})
    constants = {**_arithmetic(layer, q.device), **sizes, "EARLY": begins_early(num_rows, q.device)}
    stages = STAGES if dim <= 256 else 1  # shared memory is for few keys of wide heads
    first = Launch(attend, (*grid, num_parts), {**inputs, **results}, constants, 4, stages, free)
    if taken == "all":
        return [first]
    # Partial results are merged by up to eight warps, one per stretch, for 32 or 128 dimensions of a head.
    spans = 1 if taken == "span" else AT_ONCE.value
    lines = min(AT_ONCE.value, triton.next_power_of_2(-(-num_keys // STRETCH)))
    width = 32 if 2 * num_rows * num_heads < MULTIPROCESSORS else 128  # one value per lane is fastest, four cheapest
    sizes = {"SPANS": spans, "PARTS": AT_ONCE.value // spans, "LINES": lines, "DIM": dim, "BLOCK": width}
    sizes["EARLY"] = begins_early(num_rows, q.device)
    return [first, Launch(combine, (num_rows, num_heads, -(-dim // width)), results, sizes, warps=lines, free=free)]


def attention(
    q: Tensor, layer: KVLayer, batch: Batch, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Grouped-query attention of q [T, H, D] over the paged cache; returns [T, H, D]. Causal, with trees and a window.

    In products, queries and weights are the sum of two terms: bf16 for a bf16 cache (16 bits in all), else float16 (22
    bits). With an fp32 cache they are float32. Raises ValueError if q does not fit the cache, TypeError unless q is
    float32.
    """
    if sinks is not None:
        say_once("no 'triton' kernel for attention with sinks; using the reference (slow)")
        return reference.attention(q, layer, batch, scale, window, sinks)
    packed = heads_packed(q)

    def kernel() -> Tensor:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        for launch in launches(packed, layer, batch, scale, window, out):
            launch.run()
        return out

    name = f"attention ({layer.format}, heads of {q.shape[2]})"  # wide heads alone may not fit a GPU's shared memory
    return guarded(name, kernel, lambda: reference.attention(q, layer, batch, scale, window))
