"""Kernels of attention over the paged cache.

Why attention is row-invariant. A row at logical position p sees keys 0..p. The ancestors of a draft node count as the
positions after the known tokens, wherever they are stored. Keys are processed in blocks of `KEYS`, spans of `SPAN` and
stretches of `STRETCH` logical positions. The blocks of a span, in ascending order, give a maximum m, a sum (mass) and
values o. The spans of a stretch are merged in ascending order, and so are the stretches of a row. A program may take a
span, a stretch or all keys: `merge` is always the same arithmetic, and merging an empty part changes no bit.

A program holds 16 queries of one sequence and one KV head: some rows times the query heads that share the KV head.
Every product is one `tl.dot` of 16 queries, and a query uses only its own line of it. Blocks of known keys serve all
rows of a tile. Blocks that reach into the draft are gathered for each draft node, because each node has its own keys.
"""

# Kernels are written in Triton's language: they have no type annotations, and comments instead of docstrings.
from __future__ import annotations

import triton
import triton.language as tl

from sameseed.ops.triton.common import inverse, power_of, wait
from sameseed.ops.triton.softmax import TILE, merge, step, terms

SEARCHED: tl.constexpr = tl.constexpr(128)  # sequences that are searched at a time


@triton.jit
def _counts(x):
    # Number of set bits in each group of 2, 4, 8, 16 and 32 bits of int64. Masks make shifts of negative numbers
    # logical.
    twos = x - ((x >> 1) & 0x5555555555555555)
    fours = (twos & 0x3333333333333333) + ((twos >> 2) & 0x3333333333333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    sixteens = (eights + (eights >> 8)) & 0x00FF00FF00FF00FF
    return twos, fours, eights, sixteens, (sixteens + (sixteens >> 16)) & 0x0000FFFF0000FFFF


@triton.jit
def _popcount(x):
    words = _counts(x)[4]
    return ((words + (words >> 32)) & 127).to(tl.int32)


@triton.jit
def _places(mask, rank):
    # Index of the set bit of the scalar `mask` that has `rank` [KEYS] set bits below it; undefined if there is none. A
    # binary search takes 6 steps for every mask; a scan bit by bit would take up to 64.
    twos, fours, eights, sixteens, words = _counts(mask)
    levels = (words, sixteens, eights, fours, twos, mask)
    found = tl.zeros_like(rank)
    for i in tl.static_range(6):
        half = 32 >> i
        below = ((levels[i] >> found.to(tl.int64)) & (2 * half - 1)).to(rank.dtype)  # set bits of the lower half
        found = tl.where(rank >= below, found + half, found)
        rank = tl.where(rank >= below, rank - below, rank)
    return found


@triton.jit
def _sequence_of(slot, offsets_ptr, num_seqs, ROWS: tl.constexpr):
    # Finds the sequence b of a slot. The tiles of sequence b begin at slot offsets[b] // ROWS + b, which leaves room
    # for all tiles, so b is the last sequence that begins at or before `slot`. Its first row and the end of its rows
    # come from the same load, which saves waiting for a second one.
    found, first, end = -1, 0, 0x7FFFFFFF
    for base in range(0, num_seqs + 1, SEARCHED):
        b = base + tl.arange(0, SEARCHED)
        offset = tl.load(offsets_ptr + b, mask=b <= num_seqs, other=0x7FFFFFFF)
        before = (b < num_seqs) & (offset // ROWS + b <= slot)
        found += tl.sum(before.to(tl.int32), axis=0)
        first = tl.maximum(first, tl.max(tl.where(before, offset, 0), axis=0))
        end = tl.minimum(end, tl.min(tl.where(before, 0x7FFFFFFF, offset), axis=0))
    return found, first, end


@triton.jit
def _spans(position, window):
    # The range [begin, end) of keys that a row sees.
    return tl.maximum(position - window + 1, 0), position + 1


@triton.jit
def _nothing(BLOCK: tl.constexpr):
    # The softmax state of no keys.
    m, o = tl.full((TILE,), float("-inf"), tl.float32), tl.zeros((TILE, BLOCK), tl.float32)
    return m, tl.zeros((TILE,), tl.float32), o, o


@triton.jit
def _fold(state, more, lines, BLOCK: tl.constexpr):
    # For the lines in `lines`, merges the second softmax into the first and resets the second.
    m, mass, o0, o1 = more
    state = merge(state, (m, tl.where(lines, mass, 0.0), o0, o1))
    no_m, no_mass, no_o, _ = _nothing(BLOCK)
    o0, o1 = tl.where(lines[:, None], no_o, o0), tl.where(lines[:, None], no_o, o1)
    return state, (tl.where(lines, no_m, m), tl.where(lines, no_mass, mass), o0, o1)


@triton.jit
def _turn(
    block, whole, stretch, span, lines, WALK: tl.constexpr, SPAN: tl.constexpr, STRETCH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # If this block begins a span, merges the previous span into its stretch. If it begins a stretch, merges the
    # previous stretch into the whole.
    if WALK != "span":
        if block % SPAN == 0:
            stretch, span = _fold(stretch, span, lines, BLOCK)
    if WALK == "all":
        if block % STRETCH == 0:
            whole, stretch = _fold(whole, stretch, lines, BLOCK)
    return whole, stretch, span


@triton.jit(
    do_not_specialize=["num_seqs", "has_tree", "q_stride", "num_parts", "table_width"],
    do_not_specialize_on_alignment=[
        "positions_ptr", "offsets_ptr", "num_pending_ptr", "kv_lens_ptr", "table_ptr", "tree_ptr",
    ],
)  # fmt: skip
def attend(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, part_ptr, sums_ptr, bounds_ptr,
    positions_ptr, offsets_ptr, num_pending_ptr, kv_lens_ptr, table_ptr, tree_ptr,
    num_seqs, has_tree, q_stride, num_parts, table_width, scale, window, num_heads, kv_heads, group,
    WALK: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr, HALVES: tl.constexpr,
    WIDEN: tl.constexpr, MACHINE: tl.constexpr, FLOAT8: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, STRETCH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # Program (slot, head, part): ROWS rows of a sequence, HEADS query heads, and a span, a stretch or all keys (WALK).
    ROWS: tl.constexpr = TILE // HEADS
    slot = tl.program_id(0)
    b, start, end = _sequence_of(slot, offsets_ptr, num_seqs, ROWS)
    first = start + (slot - start // ROWS - b) * ROWS
    if first < end:
        tiles = tl.cdiv(group, HEADS)  # tiles of query heads that share a KV head
        kv_head = tl.program_id(1) // tiles
        kv_len, pending_end = tl.load(kv_lens_ptr + b), start + tl.load(num_pending_ptr + b)
        table = table_ptr + b.to(tl.int64) * table_width
        line = tl.arange(0, TILE)
        t, own = first + line // HEADS, (tl.program_id(1) % tiles) * HEADS + line % HEADS  # row; head within the group
        real = (t < end) & (own < group)
        t_safe, head = tl.where(t < end, t, first).to(tl.int64), kv_head * group + tl.where(own < group, own, 0)
        node = t_safe >= pending_end
        mask = tl.load(tree_ptr + t_safe, mask=tl.zeros_like(t_safe) + has_tree != 0, other=0)
        position = tl.where(node, kv_len + _popcount(mask) - 1, tl.load(positions_ptr + t_safe))
        low, high = _spans(position, window)
        shared = kv_len // KEYS * KEYS  # earlier blocks have only known keys
        reach = tl.where(node, tl.minimum(high, shared), high)
        tile_low, tile_high = tl.min(low, axis=0), tl.max(high, axis=0)
        # The keys of this program: [begin, stop).
        TAKEN: tl.constexpr = SPAN if WALK == "span" else STRETCH
        begin, stop = tile_low // KEYS * KEYS, tile_high
        wait(EARLY)  # all reads so far are from the batch, which is complete when the pass begins
        if WALK != "all":
            begin = tl.maximum(begin, tl.program_id(2) * TAKEN)
            stop = tl.minimum(stop, tl.program_id(2) * TAKEN + TAKEN)
            if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):  # spans of each row: `combine` reads only these
                one = (t < end) & (line % HEADS == 0)
                tl.store(bounds_ptr + t_safe * 2, low // SPAN, mask=one)
                tl.store(bounds_ptr + t_safe * 2 + 1, (high - 1) // SPAN + 1, mask=one)
        if begin < stop:
            HALF: tl.constexpr = (DIM + 1) // 2
            NEXT: tl.constexpr = HALF if KIND == "float" else 1  # distance from the first part to the second
            EACH: tl.constexpr = 1 if KIND == "float" else 2
            cols = tl.arange(0, BLOCK)
            ins0 = real[:, None] & (cols < HALF)[None, :]
            ins1 = real[:, None] & (cols < DIM - HALF)[None, :]
            q_at = q_ptr + (t_safe[:, None] * q_stride + head[:, None] * DIM + cols[None, :] * EACH)
            q0 = tl.load(q_at, mask=ins0, other=0.0) * scale
            q1 = tl.load(q_at + NEXT, mask=ins1, other=0.0) * scale
            q_power = tl.full((TILE,), 1.0, tl.float32)
            if SPLIT:
                bits = power_of(tl.maximum(tl.max(tl.abs(q0), axis=1), tl.max(tl.abs(q1), axis=1)))
                q0, q1 = q0 * inverse(bits)[:, None], q1 * inverse(bits)[:, None]
                q_power = bits.to(tl.float32, bitcast=True)
            NUMBER: tl.constexpr = k_ptr.dtype.element_ty if KIND == "float" else tl.float16
            q0_high, q0_low = terms(q0, NUMBER, SPLIT, WIDEN)
            q1_high, q1_low = terms(q1, NUMBER, SPLIT, WIDEN)
            queries = (q0_high, q0_low, q1_high, q1_low, q_power)
            cache = (k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, kv_head, kv_heads)
            keys = tl.arange(0, KEYS)
            all_lines = line >= 0
            whole, stretch, span = _nothing(BLOCK), _nothing(BLOCK), _nothing(BLOCK)
            for block in range(begin, tl.minimum(stop, tl.max(reach, axis=0)), KEYS):
                # Spans are merged only when the next one begins: a node's last span may continue in the loop below.
                whole, stretch, span = _turn(block, whole, stretch, span, all_lines, WALK, SPAN, STRETCH, BLOCK)
                index = block + keys
                visible = (index[None, :] >= low[:, None]) & (index[None, :] < reach[:, None])
                sees = (block + KEYS > low) & (block < reach)
                span = step(
                    queries, span, index, index < kv_len, visible, sees, cache,
                    KIND, SCALED, SPLIT, WIDEN, HALVES, MACHINE, FLOAT8, PAGE, DIM, BLOCK,
                )  # fmt: skip
            # One loop over the blocks of all nodes, so that the next node's keys are loaded during the current
            # products.
            row_first, own_begin = tl.maximum(first, pending_end), tl.maximum(begin, shared)
            each = tl.maximum(tl.cdiv(stop - own_begin, KEYS), 1)  # blocks per row, if any
            rows = tl.where(own_begin < stop, tl.minimum(first + ROWS, end) - row_first, 0)
            for i in range(rows * each):
                row, block = row_first + i // each, own_begin + i % each * KEYS
                tree = tl.load(tree_ptr + row)
                row_low, row_high = _spans(kv_len + _popcount(tree) - 1, window)
                lines = (t == row) & (block + KEYS > row_low) & (block < row_high)
                whole, stretch, span = _turn(block, whole, stretch, span, lines, WALK, SPAN, STRETCH, BLOCK)
                place = block + keys
                index = tl.where(place < kv_len, place, kv_len + _places(tree, place - kv_len))
                wanted = (place >= row_low) & (place < row_high)
                span = step(
                    queries, span, index, wanted, lines[:, None] & wanted[None, :], lines, cache,
                    KIND, SCALED, SPLIT, WIDEN, HALVES, MACHINE, FLOAT8, PAGE, DIM, BLOCK,
                )  # fmt: skip
            if WALK != "span":
                span = merge(stretch, span)
            if WALK == "all":
                _, mass, o0, o1 = merge(whole, span)
                out_at = out_ptr + ((t_safe * num_heads + head)[:, None] * DIM + cols[None, :] * EACH)
                shared_mass = tl.broadcast_to(mass[:, None], (TILE, BLOCK))
                tl.store(out_at, tl.div_rn(o0, shared_mass), mask=ins0)
                tl.store(out_at + NEXT, tl.div_rn(o1, shared_mass), mask=ins1)
            else:
                m, mass, o0, o1 = span
                where = (t_safe * num_heads + head) * num_parts + tl.program_id(2)
                part_at = part_ptr + (where[:, None] * DIM + cols[None, :] * EACH)
                tl.store(part_at, o0, mask=ins0 & (mass != 0.0)[:, None])
                tl.store(part_at + NEXT, o1, mask=ins1 & (mass != 0.0)[:, None])
                tl.store(sums_ptr + where * 2, m, mask=real)
                tl.store(sums_ptr + where * 2 + 1, mass, mask=real)
    else:
        wait(EARLY)  # a kernel must not end before the previous kernel ends
