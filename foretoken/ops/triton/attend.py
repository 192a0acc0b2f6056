"""Kernels of attention over the paged cache.

The law of rows. A row at logical position p sees keys 0..p; a draft node's ancestors stand at the positions after the
known tokens, wherever they are stored. Keys go in blocks of `KEYS` and spans of `SPAN` logical positions. Of a span,
its blocks in ascending order give a maximum m, a sum (mass) and values o; the spans of a row are merged in ascending
order. Whether one program walks all spans or one program takes each changes nothing: `_merge` is the same arithmetic.

A program holds 16 queries of one sequence and one KV head: some rows times the query heads that share it. Every product
is one `tl.dot` of 16 queries, and a row keeps to its own line of it. Blocks of known keys serve all rows of a tile;
blocks that reach into the draft are gathered for each node alone, since its keys there are its own.
"""

# Kernels are Triton's language, not Python's: types and docstrings stay outside.
from __future__ import annotations

import triton
import triton.language as tl

from foretoken.batch import MAX_NODES
from foretoken.ops.triton.cached_rows import as_numbers

TILE: tl.constexpr = tl.constexpr(16)  # queries of a product: the tensor cores' smallest
NODES: tl.constexpr = tl.constexpr(MAX_NODES)


@triton.jit
def _popcount(x):
    # Set bits of int64; the shifts of a negative one are made logical by masks.
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 127).to(tl.int32)


@triton.jit
def _places(mask, rank):
    # Index of the set bit of `mask` (a scalar) that has `rank` [KEYS] set bits below it; 0 where there is none.
    bit = tl.arange(0, NODES)
    below = _popcount(mask & ((tl.full((NODES,), 1, tl.int64) << bit) - 1))
    here = (((mask >> bit) & 1) == 1)[None, :] & (below[None, :] == rank[:, None])
    return tl.sum(tl.where(here, bit[None, :], 0), axis=1)


@triton.jit
def _merge(m, mass, o, m_new, l_new, o_new):
    # Two partial softmaxes [TILE], [TILE], [TILE, D]; nothing was seen of one whose sum is 0.
    top = tl.maximum(m, m_new)
    old, new = tl.exp2(m - top), tl.exp2(m_new - top)
    seen, first = l_new != 0.0, mass == 0.0
    l_both = tl.where(first, l_new, mass * old + l_new * new)
    o_both = tl.where(first[:, None], o_new, o * old[:, None] + o_new * new[:, None])
    m = tl.where(seen, tl.where(first, m_new, top), m)
    return m, tl.where(seen, l_both, mass), tl.where(seen[:, None], o_both, o)


@triton.jit
def _halves(x, DTYPE: tl.constexpr, WIDEN: tl.constexpr):
    # x as the sum of two numbers of a shorter type.
    high = x.to(DTYPE)
    low = (x - high.to(tl.float32)).to(DTYPE)
    if WIDEN:  # the interpreter knows no products of bfloat16
        high, low = high.to(tl.float32), low.to(tl.float32)
    return high, low


@triton.jit
def _power(largest):
    # The power of two at or below `largest`, kept within 2^-100 .. 2^126.
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(bits, 27 << 23), 253 << 23)


@triton.jit
def _split_product(x, y, SPLIT: tl.constexpr, WIDEN: tl.constexpr):
    # x [TILE, K] float32 times y [K, N] as it is stored: a row of x under a power of two, in two terms of y's type.
    if SPLIT:
        bits = _power(tl.max(tl.abs(x), axis=1))
        x = x * ((254 << 23) - bits).to(tl.float32, bitcast=True)[:, None]
        high, low = _halves(x, y.dtype, WIDEN)
        if WIDEN:
            y = y.to(tl.float32)
        product = tl.dot(high, y, input_precision="ieee") + tl.dot(low, y, input_precision="ieee")
        product = product * bits.to(tl.float32, bitcast=True)[:, None]
    else:
        product = tl.dot(x, y, input_precision="ieee")
    return product


@triton.jit
def _step(
    q, m, mass, o, index, loaded, visible, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, kv_head, kv_heads,
    KIND: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One block of keys, stored at `index` [KEYS], into the softmax of the queries that see some of it.
    page = tl.load(table + index // PAGE, mask=loaded, other=0).to(tl.int64)
    row = (page * PAGE + index % PAGE) * kv_heads + kv_head  # [KEYS]
    dims = tl.arange(0, BLOCK_D)
    at = row[:, None] * DIM + dims[None, :]
    inside = loaded[:, None] & (dims < DIM)[None, :]
    keys = as_numbers(tl.load(k_ptr + at, mask=inside, other=0), KIND)
    scores = _split_product(q, tl.trans(keys), SPLIT, WIDEN)  # [TILE, KEYS]
    if SCALED:
        scores = scores * tl.load(k_scale_ptr + row, mask=loaded, other=0.0)[None, :]
    scores = tl.where(visible, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, axis=1))
    weights = tl.where(visible, tl.exp2(scores - top[:, None]), 0.0)
    faded = tl.exp2(m - top)
    total = mass * faded + tl.sum(weights, axis=1)
    values = as_numbers(tl.load(v_ptr + at, mask=inside, other=0), KIND)
    if SCALED:
        v_scale = tl.load(v_scale_ptr + row, mask=loaded, other=0.0)[None, :]
        weights = tl.where(visible, weights * v_scale, 0.0)
    mixed = o * faded[:, None] + _split_product(weights, values, SPLIT, WIDEN)
    sees = tl.max(visible.to(tl.int32), axis=1) == 1
    return tl.where(sees, top, m), tl.where(sees, total, mass), tl.where(sees[:, None], mixed, o)


@triton.jit
def _sequence_of(slot, offsets_ptr, num_seqs, ROWS: tl.constexpr):
    # Tiles of sequence b begin at slot offsets[b] // ROWS + b, which leaves room for all: the last b at or before slot.
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(offsets_ptr + middle) // ROWS + middle <= slot:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _spans(position, window):
    # First and one past the last key that a row sees.
    return tl.maximum(position - window + 1, 0), position + 1


@triton.jit(do_not_specialize=["num_seqs", "has_tree", "q_stride", "num_spans", "table_width"])
def attend(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, part_ptr, sums_ptr,
    positions_ptr, offsets_ptr, num_pending_ptr, kv_lens_ptr, table_ptr, tree_ptr,
    num_seqs, has_tree, q_stride, num_spans, table_width, scale, window, num_heads, kv_heads, group,
    WHOLE: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    # Program (slot, head, span): ROWS rows of a sequence, HEADS query heads; one span, or all of them (WHOLE).
    ROWS: tl.constexpr = TILE // HEADS
    slot = tl.program_id(0)
    b = _sequence_of(slot, offsets_ptr, num_seqs, ROWS)
    start = tl.load(offsets_ptr + b)
    first = start + (slot - start // ROWS - b) * ROWS
    end = tl.load(offsets_ptr + b + 1)
    if first < end:
        tiles = tl.cdiv(group, HEADS)  # of query heads that share a KV head
        kv_head = tl.program_id(1) // tiles
        kv_len, pending_end = tl.load(kv_lens_ptr + b), start + tl.load(num_pending_ptr + b)
        table = table_ptr + b.to(tl.int64) * table_width
        line = tl.arange(0, TILE)
        t, own = first + line // HEADS, (tl.program_id(1) % tiles) * HEADS + line % HEADS  # row; head in the group
        real = (t < end) & (own < group)
        t_safe, head = tl.where(t < end, t, first).to(tl.int64), kv_head * group + tl.where(own < group, own, 0)
        node = t_safe >= pending_end
        mask = tl.load(tree_ptr + t_safe, mask=node & (tl.zeros_like(t_safe) + has_tree != 0), other=0)
        position = tl.where(node, kv_len + _popcount(mask) - 1, tl.load(positions_ptr + t_safe))
        low, high = _spans(position, window)
        shared = kv_len // KEYS * KEYS  # blocks before are known keys alone
        reach = tl.where(node, tl.minimum(high, shared), high)
        shared_low, shared_high = tl.min(low, axis=0), tl.max(reach, axis=0)
        dims = tl.arange(0, BLOCK_D)
        q_at = t_safe[:, None] * q_stride + head[:, None] * DIM + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=real[:, None] & (dims < DIM)[None, :], other=0.0) * scale
        keys = tl.arange(0, KEYS)
        m = tl.full((TILE,), float("-inf"), tl.float32)
        mass, o = tl.zeros((TILE,), tl.float32), tl.zeros((TILE, BLOCK_D), tl.float32)
        first_span = shared_low // SPAN if WHOLE else tl.program_id(2)
        last_span = tl.max((high - 1) // SPAN, axis=0) if WHOLE else tl.program_id(2)
        for span in range(first_span, last_span + 1):
            span_m = tl.full((TILE,), float("-inf"), tl.float32)
            span_l, span_o = tl.zeros((TILE,), tl.float32), tl.zeros((TILE, BLOCK_D), tl.float32)
            begin = tl.maximum(span * SPAN, shared_low // KEYS * KEYS)
            for block in range(begin, tl.minimum(span * SPAN + SPAN, shared_high), KEYS):
                index = block + keys
                visible = (index[None, :] >= low[:, None]) & (index[None, :] < reach[:, None])
                span_m, span_l, span_o = _step(
                    q, span_m, span_l, span_o, index, index < kv_len, visible,
                    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, kv_head, kv_heads,
                    KIND, SCALED, SPLIT, WIDEN, PAGE, DIM, BLOCK_D,
                )  # fmt: skip
            for row in range(tl.maximum(first, pending_end), tl.minimum(first + ROWS, end)):
                tree = tl.load(tree_ptr + row)
                row_low, row_high = _spans(kv_len + _popcount(tree) - 1, window)
                begin = tl.maximum(tl.maximum(span * SPAN, shared), row_low // KEYS * KEYS)
                for block in range(begin, tl.minimum(span * SPAN + SPAN, row_high), KEYS):
                    place = block + keys
                    index = tl.where(place < kv_len, place, kv_len + _places(tree, place - kv_len))
                    wanted = (place >= row_low) & (place < row_high)
                    span_m, span_l, span_o = _step(
                        q, span_m, span_l, span_o, index, wanted, (t == row)[:, None] & wanted[None, :],
                        k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, kv_head, kv_heads,
                        KIND, SCALED, SPLIT, WIDEN, PAGE, DIM, BLOCK_D,
                    )  # fmt: skip
            m, mass, o = _merge(m, mass, o, span_m, span_l, span_o)
        where = t_safe * num_heads + head
        here = real[:, None] & (dims < DIM)[None, :]
        if WHOLE:
            shares = tl.div_rn(o, tl.broadcast_to(mass[:, None], (TILE, BLOCK_D)))
            tl.store(out_ptr + where[:, None] * DIM + dims[None, :], shares, mask=here)
        else:
            where = where * num_spans + tl.program_id(2)
            tl.store(part_ptr + where[:, None] * DIM + dims[None, :], o, mask=here & (mass != 0.0)[:, None])
            tl.store(sums_ptr + where * 2, m, mask=real)
            tl.store(sums_ptr + where * 2 + 1, mass, mask=real)


@triton.jit(do_not_specialize=["num_spans"])
def combine(part_ptr, sums_ptr, out_ptr, num_spans, num_heads, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    # Program (t, heads): the spans of TILE query heads of one row, merged in ascending order.
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = head < num_heads
    where = tl.program_id(0).to(tl.int64) * num_heads + head
    dims = tl.arange(0, BLOCK_D)
    here = real[:, None] & (dims < DIM)[None, :]
    m = tl.full((TILE,), float("-inf"), tl.float32)
    mass, o = tl.zeros((TILE,), tl.float32), tl.zeros((TILE, BLOCK_D), tl.float32)
    for span in range(num_spans):
        at = where * num_spans + span
        span_m = tl.load(sums_ptr + at * 2, mask=real, other=float("-inf"))
        span_l = tl.load(sums_ptr + at * 2 + 1, mask=real, other=0.0)
        written = here & (span_l != 0.0)[:, None]
        span_o = tl.load(part_ptr + at[:, None] * DIM + dims[None, :], mask=written, other=0.0)
        m, mass, o = _merge(m, mass, o, span_m, span_l, span_o)
    shared = tl.broadcast_to(mass[:, None], (TILE, BLOCK_D))
    tl.store(out_ptr + where[:, None] * DIM + dims[None, :], tl.div_rn(o, shared), mask=here)
