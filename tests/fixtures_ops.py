"""Random caches and batches for tests of the ops, and attention as one dense float64 formula."""

import random
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor

from sameseed import ops, scheme
from sameseed.batch import Batch, Rows, ancestor_masks, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.scheme import KVLayer

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KV_FORMATS = sorted(["fp32", "bf16", "fp16", *LARGEST])


def randn(*shape, seed=0):
    """Normal noise on the default device, with the same values on every device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(torch.get_default_device())


def unusual_rows(dim):
    """Cache rows [18, 2, dim]: outliers, ties, ends of the range, one size or sign, all powers of two, no numbers."""
    x, powers = randn(18, 2, dim), 2.0 ** -(torch.arange(dim) % 24)
    x[0, 0, dim // 2] = 1e4
    x[1], x[2] = x[1].round(), 3.25
    x[3], x[4] = -x[3].abs(), x[4].abs() + 100
    for i, size in enumerate(
        (torch.finfo(torch.float32).max, 0.0, 2.0**-149, 2.0**-126, 2.0**-101, 2.0**-100, 1e-3), 5
    ):
        x[i] = size * x[i].sign()
    x[12], x[13], x[14] = 448 * powers, -476 * powers, 57344 * powers
    x[15, 0, -1], x[16, 1, 0], x[17, 0, 0] = torch.nan, torch.inf, -torch.inf
    return x


@contextmanager
def threads(count):
    """Let backends use `count` threads, afterwards one, as the test session's fixture does."""
    ops.set_num_threads(count)
    try:
        yield
    finally:
        ops.set_num_threads(1)


@dataclass(frozen=True)
class Part:
    """One sequence of a random pass: number of cached rows, number of pending rows, parents of its draft nodes."""

    cached: int
    pending: int
    parents: Seq[int] = ()

    @property
    def kv_len(self):
        return self.cached + self.pending

    @property
    def stored(self):
        return self.kv_len + len(self.parents)


def state_batch(spans, slots):
    """A pass over tokens [begin, end) of sequences whose states are in these slots."""
    at = torch.tensor([p for begin, end in spans for p in range(begin, end)], dtype=torch.int32)
    offsets = torch.tensor([0, *accumulate(end - begin for begin, end in spans)], dtype=torch.int32)
    blank, states = torch.zeros(1, dtype=torch.int32), torch.tensor([slots] * 3, dtype=torch.int32)
    return Batch(at, at, at, offsets, blank, blank, blank[None], None, blank, states=states)


@dataclass(frozen=True)
class Pass:
    """A batch, a cache with all rows of its sequences (other rows are poisoned), and queries [T, H, D]."""

    parts: Seq[Part]
    batch: Batch
    layer: KVLayer
    q: Tensor


def empty_layer(name, num_blocks, block_size, kv_heads, dim):
    """A cache of NaN (or 77): reading a row that was never written, or belongs to no sequence, shows in the result."""
    device = str(torch.get_default_device())
    layer = KVCache([(kv_heads, dim)], num_blocks, block_size, name, device).layers[0]
    for rows in flat(layer):
        rows.fill_(float("nan") if rows.is_floating_point() else 77)
    return layer


def flat(layer):
    """The cache's tensors by slot."""
    tensors = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    return [t.view(-1, *t.shape[2:]) for t in tensors if t is not None]


def slot_lists(parts, batch, block_size):
    """The slot of each storage index, for each sequence."""
    tables = batch.block_tables.tolist()
    return [
        [tables[b][i // block_size] * block_size + i % block_size for i in range(p.stored)] for b, p in enumerate(parts)
    ]


def make_pass(parts, kv_format="fp32", heads=4, kv_heads=2, dim=12, block_size=5, seed=0):
    """A pass over sequences whose blocks are scattered in the cache."""
    needed = [-(-p.stored // block_size) for p in parts]
    free = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(free)
    rows = []
    for p, count in zip(parts, needed, strict=True):
        blocks = [free.pop() for _ in range(count)]
        rows.append(Rows([0] * p.pending, p.cached, [0] * len(p.parents), p.parents, blocks, True))
    batch = build_batch(rows, block_size, torch.get_default_device())
    layer = empty_layer(kv_format, sum(needed) + 3, block_size, kv_heads, dim)
    fmt = scheme.kv_format(kv_format)
    slots = torch.tensor([s for row in slot_lists(parts, batch, block_size) for s in row])
    tensors = flat(layer)
    for i in range(2):
        codes, scales = fmt.encode_kv(2 * randn(len(slots), kv_heads, dim, seed=seed * 7 + i))
        tensors[i][slots] = codes
        if scales is not None:
            tensors[2 + i][slots] = scales
    return Pass(parts, batch, layer, 2 * randn(batch.num_rows, heads, dim, seed=seed * 7 + 5))


def visible(part, row):
    """Storage indices that a row of the part attends to, in order of position, and the row's own position."""
    if row < part.pending:
        position = part.cached + row
        return list(range(position + 1)), position
    masks, depths = ancestor_masks(part.parents)
    node = row - part.pending
    nodes = [part.kv_len + j for j in range(node + 1) if masks[node] >> j & 1]
    return [*range(part.kv_len), *nodes], part.kv_len + depths[node]


def exact_attention(p, scale, window=None):
    """Attention of a pass by one masked softmax over all stored rows, in float64: [T, H, D]."""
    fmt = scheme.kv_format(p.layer.format)
    tensors = flat(p.layer)
    out = []
    row = 0
    for part, slots in zip(p.parts, slot_lists(p.parts, p.batch, p.layer.k.shape[1]), strict=True):
        scales = [t[slots] for t in tensors[2:]] or [None, None]
        k, v = (fmt.decode_kv(tensors[i][slots], scales[i]).double() for i in range(2))  # [S, Hk, D]
        depths = ancestor_masks(part.parents)[1]
        place = torch.tensor([*range(part.kv_len), *(part.kv_len + d for d in depths)])  # [S] logical positions
        count = part.pending + len(part.parents)
        mask = torch.zeros(count, part.stored, dtype=torch.bool)
        for r in range(count):
            keys, position = visible(part, r)
            mask[r, keys] = True
            if window is not None:
                mask[r] &= place > position - window
        group = p.q.shape[1] // k.shape[1]
        q = p.q[row : row + count]  # [T, H, D]
        rounded = scheme.kv_format(p.layer.format).query_dtype
        q = q.double() * scale if rounded is torch.float32 else scheme.round_queries(q * scale, rounded).double()
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1))
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out.append(torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1)))
        row += count
    return torch.cat(out)


def alone(p, b, row, block_size):
    """Row `row` of sequence b as the only row of a pass, with its keys in plain order in another cache."""
    part = p.parts[b]
    keys, position = visible(part, row)
    single = Part(position, 1)
    blocks = list(range(-(-len(keys) // block_size)))[::-1]
    batch = build_batch([Rows([0], position, [], [], blocks, True)], block_size, torch.get_default_device())
    layer = empty_layer(p.layer.format, len(blocks), block_size, p.layer.k.shape[2], p.q.shape[2])
    source = slot_lists(p.parts, p.batch, p.layer.k.shape[1])[b]
    target = slot_lists([single], batch, block_size)[0]
    for theirs, ours in zip(flat(p.layer), flat(layer), strict=True):
        ours[target] = theirs[[source[k] for k in keys]]
    first = int(p.batch.row_offsets[b])
    return replace(p, parts=[single], batch=batch, layer=layer, q=p.q[first + row : first + row + 1].clone())


@st.composite
def passes(draw, names, dims, even=()):
    """A random pass (chains, trees, chunks, odd head dims) and a window. `even`: formats for even head dims only."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        pending = draw(st.integers(1, 20))
        nodes = draw(st.integers(0, 12) | st.just(64)) if pending < 3 else 0
        parents = [draw(st.integers(-1, i - 1)) if nodes < 64 else i - 1 - i % 3 for i in range(nodes)]
        parts.append(Part(draw(st.integers(0, 140) | st.integers(240, 560)), pending, [max(-1, p) for p in parents]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 7, 17]))
    dim, block_size = draw(st.sampled_from(dims)), draw(st.sampled_from([1, 5, 16, 64]))
    name = draw(st.sampled_from([*names, *(() if dim % 2 else even)]))
    made = make_pass(parts, name, kv_heads * group, kv_heads, dim, block_size, draw(st.integers(0, 99)))
    return made, draw(st.none() | st.integers(1, 400))


def check_moves(move_kv, kv_format):
    """Rows of the cache move as if all of them were read before one is written."""
    for moves in ([], [(5, 2)], [(3, 2), (4, 3), (9, 4)], [(9, 0), (8, 1)], [(12, 1), (19, 12)], [(1, 2), (2, 1)]):
        layer = make_pass([Part(0, 20)], kv_format).layer
        wanted = [t.clone() for t in flat(layer)]
        for tensor in wanted:
            tensor[[d for _, d in moves]] = tensor[[s for s, _ in moves]]
        src, dst = (torch.tensor([m[i] for m in moves], dtype=torch.int32) for i in range(2))
        move_kv(layer, src, dst)
        for tensor, new in zip(flat(layer), wanted, strict=True):  # compared as bytes, since NaN != NaN
            assert tensor.view(torch.uint8).equal(new.view(torch.uint8)), moves
