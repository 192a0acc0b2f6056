"""The specification of every op, in PyTorch: short, slow and row-invariant.

Row-invariance follows from one rule: everything that rounds (sums, exponentials) is computed one row at a time, by the
same call on tensors of the same shape. So a row's bits cannot depend on the other rows. PyTorch's own matmul, and even
its element-wise exponential (vector body, scalar tail), change bits with the number of rows. Its matrix-vector product
also changes bits with the number of threads, so the reference uses one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import torch
from torch import Tensor

from sameseed import registry, scheme
from sameseed.batch import MAX_NODES, Batch
from sameseed.ops._rows import (
    DeltaWeights,
    ExpertWeights,
    RowSource,
    StateLayer,
    gated_rows,
    outlier_product,
    outlier_views,
    plain_rows,
)
from sameseed.scheme import TOKENS, KVLayer, QuantTensor

row_invariant = True
LINEAR_FORMATS = frozenset(name for name, module in registry.loaded("formats").items() if module.FORMAT.weights)
NO_SUM = 1e-6  # added to a sum of sigmoids that divides them
KV_FORMATS = frozenset(n for n, module in registry.loaded("formats").items() if module.FORMAT.kv_dtype is not None)


def unavailable() -> str | None:
    """The reference runs everywhere."""
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Make PyTorch use one thread for calls from the current thread; PyTorch keeps this count per thread."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@one_thread()
def _by_row(function: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """Apply `function` to each row of x [T, C], copied to new (equally aligned) memory; returns [T, width]."""
    out = torch.empty(x.shape[0], width, dtype=torch.float32, device=x.device)
    for t in range(x.shape[0]):
        out[t] = function(x[t].clone())
    return out


def embedding(token_ids: Tensor, w: QuantTensor) -> Tensor:
    """Rows token_ids [T] of an embedding [V, C] as float32 [T, C]."""
    return scheme.get(w.format).decode_rows(w, token_ids)


def product(rows: RowSource, w: QuantTensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Rows [T, K] times w [O, K] transposed, plus bias [O], plus residual [T, O]; returns [T, O].

    The activations of the weight decide how rows are rounded first. int8: rows are quantized (`scheme.quantize_rows`).
    fp8: rows are rounded (`scheme.round_rows`). Both work per row and group of the weight, so other rows have no
    influence. bf16: each number is rounded. outliers: two products (`outlier_product`).
    If the weight has an `order`, the columns of x must be in this order already.
    """
    x, w = rows.prepared(rms_norm, silu_mul, gelu_mul), replace(w, order=None)
    if w.activations == "outliers":
        return outlier_product(product, x, outlier_views(w), bias, residual)
    if w.activations == "int8":
        out = _integer_product(x, w)
    else:
        x = scheme.float_rows(x, w)
        weight = scheme.get(w.format).decode(w)
        out = _by_row(lambda row: torch.mv(weight, row), x, w.shape[0])
    if bias is not None:
        out = out + bias
    return out if residual is None else residual + out


def _integer_product(x: Tensor, w: QuantTensor) -> Tensor:
    """x [T, K], quantized by row and group, times w [O, K] transposed.

    Starts with f = 0. For each group, ascending, and each of the format's `scale_parts` in turn:
    f = fma(float(sum of integer products), scale of w * scale of x, f). The sums are exact (float64 holds them) and
    everything else is element-wise, so other rows cannot change a row's bits.
    """
    assert w.activations == "int8", w.activations
    fmt, num_groups = scheme.get(w.format), w.shape[1] // w.group
    scales = {p: w.parts[p].float().T.contiguous() for p in fmt.scale_parts}  # [K / G, O]
    codes, row_scales = scheme.quantize_rows(x, w.group)
    rows = codes.double().view(-1, num_groups, w.group, 1)  # [T, K / G, G, 1]
    out = torch.zeros(x.shape[0], w.shape[0], device=x.device)
    for start in range(0, w.shape[0], 4096):  # chunks of outputs, to bound the memory
        part = slice(start, min(start + 4096, w.shape[0]))
        index = torch.arange(part.start, part.stop, device=x.device)
        integers: dict[str, Tensor] = {}  # [K / G, O, G]
        for p in scales:  # the integers under this scale: decoded values with this scale 1 and all other scales 0
            units = {other: torch.full_like(w.parts[other], float(other == p)) for other in scales}
            values = fmt.decode_rows(replace(w, parts={**w.parts, **units}), index)
            integers[p] = values.double().view(len(index), -1, w.group).transpose(0, 1).contiguous()
        for t in range(x.shape[0]):
            sums = {p: torch.bmm(n, rows[t]).squeeze(-1).float() for p, n in integers.items()}  # [K / G, O]
            for g in range(num_groups):
                for p, scale in scales.items():
                    out[t, part] = _fma(sums[p][g], scale[g, part] * row_scales[t, g], out[t, part])
    return out


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32, rounded once.

    In float64 the product is exact. The sum is rounded to odd: if inexact, to the neighbour whose last bit is set.
    Rounding this sum to float32 then equals rounding once (Boldo and Melquiond, 2008).
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    up = torch.full_like(total, torch.inf).copysign(error)
    even = (total.view(torch.int64) & 1) == 0
    return torch.where((error != 0) & even, torch.nextafter(total, up), total).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, C] divided by its root mean square over C, times weight [C] (Zhang and Sennrich, 2019)."""
    return _by_row(lambda row: row * torch.rsqrt(row.square().mean() + eps), x, x.shape[1]) * weight


def split_heads(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    norms: Seq[Tensor] | None = None,
    eps: float = 0.0,
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [T, (H + 2 Hk) D] into q [T, H, D] and k, v [T, Hk, D]: views, unless they are normed per head.

    `norms`: the norm weights [D] of q, of k and perhaps of v, or None. `norm`: the backend's rms_norm.
    """
    count = heads + 2 * kv_heads
    split = qkv.view(-1, count, qkv.shape[1] // count)  # [T, H + 2 Hk, D]
    parts = [split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]]
    for i, weight in enumerate(norms or ()):
        parts[i] = norm(parts[i].flatten(0, 1), weight, eps).view_as(parts[i])
    return parts[0], parts[1], parts[2]


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate x [T, H, D] by position (Su et al., 2021; halves as in Hugging Face). table [P, D]: cosines, sines."""
    half = x.shape[-1] // 2
    angles = table[positions.long()][:, None, :]  # [T, 1, D]
    cos, sin = angles[..., :half], angles[..., half:]
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def silu_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """silu of the first half of gate_up [T, 2I] times the second; returns [T, I] (SwiGLU: Shazeer, 2020).

    With a limit, gpt-oss's: g = min(gate, limit), u = up within -limit..limit, then (u + 1) * (g * sigmoid(1.702 g)).
    """
    half = gate_up.shape[1] // 2

    def gated(row: Tensor) -> Tensor:
        gate, up = row[:half], row[half:]
        if limit is None:
            return torch.nn.functional.silu(gate) * up
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1)

    return _by_row(gated, gate_up, half)


def choose_experts(
    logits: Tensor, top_k: int, normalize: bool, chosen_by: Tensor | None = None, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Experts int64 [T, k] of each row of logits [T, E], by descending logit, and their weights float32 [T, k].

    Of equal logits, that of the lower expert comes first. The weights are a softmax over the chosen logits, or over all
    if not `normalize`. `chosen_by`, `factor`: as in `ExpertWeights`.
    """
    if chosen_by is not None:
        scores = _by_row(lambda row: row.double().sigmoid().float(), logits, logits.shape[1])
        chosen = torch.sort(scores + chosen_by, dim=1, descending=True, stable=True)[1][:, :top_k]
        weights = scores.gather(1, chosen)
        if normalize:
            weights = weights / (reduce(torch.add, weights.unbind(1)) + NO_SUM)[:, None]
        return chosen, weights * factor
    ordered, chosen = torch.sort(logits, dim=1, descending=True, stable=True)
    counted = ordered[:, :top_k] if normalize else ordered
    weights = _by_row(lambda row: row.double().softmax(0).float(), counted, counted.shape[1])
    return chosen[:, :top_k], weights[:, :top_k]


def experts(
    rows: RowSource,
    w: ExpertWeights,
    residual: Tensor | None = None,
    product: Callable[..., Tensor] = product,
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
    logits: Tensor | None = None,
) -> Tensor:
    """A mixture of experts of rows [T, C], plus residual [T, C]; returns [T, C].

    Rows are grouped by expert: each (row, slot) has the bits that it has alone. A row adds weight * result of its slots
    in their order, and then the residual. Weights of experts that no row chose are not read. `product` and `norm` are
    the backend's. `logits` [T, E]: the router's, where it reads something else than `rows`.
    """
    x = rows.prepared(norm, silu_mul, gelu_mul)
    logits = product(plain_rows(x), w.router, w.router_bias) if logits is None else logits
    chosen, weights = choose_experts(logits, w.top_k, w.normalize, w.chosen_by, w.factor)
    weights = weights if w.factors is None else weights * w.factors[chosen]
    results = x.new_empty(*chosen.shape, x.shape[1])  # [T, k, C]
    for e in sorted(set(chosen.flatten().tolist())):
        at, slot = (chosen == e).nonzero(as_tuple=True)
        bias = None if w.gate_up_bias is None else w.gate_up_bias[e]
        gate_up = product(plain_rows(x[at]), w.gate_up[e], bias)
        bias = None if w.down_bias is None else w.down_bias[e]
        inner = gated_rows(gate_up, w.act) if w.limit is None else plain_rows(silu_mul(gate_up, w.limit))
        results[at, slot] = product(inner, w.down[e], bias)
    total = torch.zeros_like(x)
    for j in range(w.top_k):
        total = total + weights[:, j, None] * results[:, j]
    return total if residual is None else residual + total


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu (its tanh form) of the first half of gate_up [T, 2I] times the second; returns [T, I]."""
    half = gate_up.shape[1] // 2
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    return _by_row(lambda row: gelu(row[:half]) * row[half:], gate_up, half)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of x [R, V]."""
    return _by_row(lambda row: torch.tanh(row / cap) * cap, x, x.shape[1])


def take(x: Tensor, index: Tensor) -> Tensor:
    """Columns `index` int32 [n] of x [T, K], in this order: [T, n]."""
    return x.index_select(1, index.long())


def gate(x: Tensor, gates: Tensor, heads: int) -> Tensor:
    """x [T, H D] times the sigmoid of its heads' gates, the last D columns of each head of gates [T, ...]."""
    parts = gates.view(x.shape[0], heads, -1)[..., -(x.shape[1] // heads) :].flatten(1)
    return _by_row(lambda row: row[0] * row[1].sigmoid(), torch.stack([x, parts], 1), x.shape[1])


@one_thread()
def delta(x: Tensor, w: DeltaWeights, layer: StateLayer, batch: Batch) -> Tensor:
    """Gated DeltaNet (Yang et al., 2024) of rows x, one by one: [T, 2 H D], the gates z and the normed results.

    x [T, ...] holds q and k [Hk K], v and z [H D], b and a [H] side by side. Rows after the stored state that are in
    the log are replayed first; csrc/delta.h has the formulas. Raises ValueError for a draft that branches.
    """
    heads, depth, dim = layer.state.shape[1:]
    taps, width = w.conv.shape
    log_rows, values, keys = layer.log.shape[1], heads * dim, (width - heads * dim) // 2
    raw = torch.cat([x[:, :width], x[:, width + values :]], 1)  # what the log holds
    out = torch.empty(x.shape[0], 2 * values, device=x.device)
    out[:, :values] = x[:, width : width + values]
    own = torch.arange(heads, device=x.device)
    own = own % (keys // depth) if w.tiled else own // (heads * depth // keys)
    assert batch.states is not None
    offsets, positions = batch.row_offsets.tolist(), batch.positions.tolist()
    for b, (slot, base, settled) in enumerate(batch.states.T.tolist()):
        first, end = positions[offsets[b]], positions[offsets[b]] + offsets[b + 1] - offsets[b]
        if positions[offsets[b] : offsets[b + 1]] != list(range(first, end)):
            raise ValueError("a draft that branches has no recurrent state")
        log = layer.log[slot]
        rows = {p: log[p % log_rows].clone() for p in range(max(0, base - taps + 1), first)}
        rows |= {p: raw[offsets[b] + p - first] for p in range(first, end)}
        state = layer.state[slot].clone() if base else torch.zeros_like(layer.state[slot])
        for p in range(base, end):
            near = [(j, rows[p - taps + 1 + j]) for j in range(taps) if p - taps + 1 + j >= 0]
            mixed = torch.stack([w.conv[j] * row[:width] for j, row in near]).sum(0)
            mixed = torch.nn.functional.silu(mixed)
            q, k = (part.view(-1, depth) for part in (mixed[:keys], mixed[keys : 2 * keys]))
            q, k = (part * torch.rsqrt(part.square().sum(1, keepdim=True) + 1e-6) for part in (q, k))
            q, k, v = (q * depth**-0.5)[own], k[own], mixed[2 * keys :].view(heads, dim)
            beta, a = rows[p][width : width + heads].sigmoid(), rows[p][width + heads :]
            decay = torch.exp(w.decay * torch.nn.functional.softplus(a + w.bias))
            known = decay[:, None] * torch.bmm(k[:, None], state)[:, 0]  # [H, D]
            change = beta[:, None] * (v - known)
            state = decay[:, None, None] * state + k[:, :, None] * change[:, None]
            if p >= first:
                result = rms_norm(torch.bmm(q[:, None], state)[:, 0], w.norm, w.eps)
                out[offsets[b] + p - first, values:] = result.flatten()
            if p + 1 == settled:
                layer.state[slot] = state
        for p in range(max(first, settled - taps + 1), end):
            log[p % log_rows] = rows[p]
    return out


def conv(x: Tensor, w: Tensor, layer: StateLayer, batch: Batch) -> Tensor:
    """A short gated convolution (LFM2) of rows x [T, 3 C], side by side gates b and c, and values v: [T, C].

    A row's result is c times the sum of w[j] times b v of the token j - taps + 1 away, j ascending; w [taps, C]. The
    log holds b v of earlier rows. Element-wise products and sums round alike in every pass. Raises ValueError for a
    draft that branches.
    """
    (taps, width), log_rows = w.shape, layer.log.shape[1]
    rows, weights, log = x.numpy(), w.numpy(), layer.log.numpy()  # small calls of NumPy take less time
    gated, out = rows[:, :width] * rows[:, 2 * width :], np.empty((len(rows), width), np.float32)
    assert batch.states is not None
    offsets, positions = batch.row_offsets.tolist(), batch.positions.tolist()
    for slot, begin, end in zip(batch.states[0].tolist(), offsets, offsets[1:]):
        first, count = positions[begin], end - begin
        if positions[begin:end] != list(range(first, first + count)):
            raise ValueError("a draft that branches has no recurrent state")
        near = np.zeros((taps - 1 + count, width), np.float32)
        for p in range(max(0, first - taps + 1), first):
            near[p - first + taps - 1] = log[slot, p % log_rows]
        near[taps - 1 :] = gated[begin:end]
        total = weights[0] * near[:count]
        for j in range(1, taps):
            total += weights[j] * near[j : j + count]
        out[begin:end] = total * rows[begin:end, width : 2 * width]
        kept = np.arange(max(0, count - log_rows), count)
        log[slot, (first + kept) % log_rows] = gated[begin + kept]
    return torch.from_numpy(out)


def _flat(layer: KVLayer) -> list[Tensor | None]:
    """Keys, values, scales of keys and scales of values, each indexed by slot."""
    tensors = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    return [None if t is None else t.view(-1, *t.shape[2:]) for t in tensors]


def store_kv(k: Tensor, v: Tensor, layer: KVLayer, slots: Tensor) -> None:
    """Encode k, v [T, Hk, D] into cache rows `slots` [T]. Scales are per row: rejected draft tokens leave no trace."""
    index = slots.long()
    parts = ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale))
    for fmt, (x, codes, scales) in zip(scheme.kv_formats(layer.format), parts):
        new_codes, new_scales = fmt.encode_kv(x)
        codes.view(-1, *codes.shape[2:])[index] = new_codes
        if scales is not None and new_scales is not None:
            scales.view(-1, scales.shape[2])[index] = new_scales


def move_kv(layer: KVLayer, src: Tensor, dst: Tensor) -> None:
    """Copy cache rows src [n] to dst [n]. All rows are read before any is written."""
    for rows in _flat(layer):
        if rows is not None:
            rows[dst.long()] = rows[src.long()]


@one_thread()
def attention(
    q: Tensor, layer: KVLayer, batch: Batch, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Grouped-query attention of q [T, H, D] over the paged cache; returns [T, H, D]. Causal, with trees and a window.

    A row at position p attends to p + 1 keys in order of position (fewer with a window). So the shapes of its products
    depend only on p, not on where its keys are stored or on its draft tree. `sinks` [H]: a logit per head that joins
    its softmax and has no value.
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    (keys, values), block_size = scheme.kv_formats(layer.format), layer.k.shape[1]
    # Copied to lists at once, so that the host waits for the device five times and not for every row.
    positions = (batch.positions if batch.key_positions is None else batch.key_positions).tolist()
    offsets, kv_lens, pending = (t.tolist() for t in (batch.row_offsets, batch.kv_lens, batch.num_pending))
    masks = None if batch.tree_mask is None else batch.tree_mask.tolist()
    k_rows, v_rows, k_scales, v_scales = _flat(layer)
    assert k_rows is not None and v_rows is not None
    for b in range(batch.num_seqs):
        table, begin, kv_len = batch.block_tables[b].long(), offsets[b], kv_lens[b]
        for t in range(begin, offsets[b + 1]):
            if t < begin + pending[b]:
                index = torch.arange(positions[t] + 1, device=q.device)
            else:
                assert masks is not None
                # Ancestors may be from earlier passes: if a tree grows level by level, its upper nodes are cached.
                nodes = [kv_len + i for i in range(MAX_NODES) if masks[t] >> i & 1]
                known = torch.arange(kv_len, device=q.device)
                index = torch.cat([known, torch.tensor(nodes, dtype=torch.long, device=q.device)])
            length = len(index)
            first = 0 if window is None else max(0, length - window)
            base = first // TOKENS * TOKENS  # start of the group that has the first key
            index = index[base:]
            slots = table[index // block_size] * block_size + index % block_size
            k = keys.decode_kv(k_rows[slots], None if k_scales is None else k_scales[slots])  # [S, Hk, D]
            v = values.decode_kv(v_rows[slots], None if v_scales is None else v_scales[slots])
            k, v = keys.seen(k, base, length)[first - base :], values.seen(v, base, length)[first - base :]
            grouped = q[t].clone().view(k.shape[1], -1, q.shape[2])  # query head h reads KV head h // (H / Hk)
            if keys.query_dtype is torch.float32:
                scores = torch.bmm(grouped, k.permute(1, 2, 0)) * scale  # [Hk, H / Hk, S]
            else:
                scores = torch.bmm(scheme.round_queries(grouped * scale, keys.query_dtype), k.permute(1, 2, 0))
            if sinks is not None:
                scores = torch.cat([scores, sinks.view(*scores.shape[:2], 1)], dim=-1)
            out[t] = torch.bmm(scores.softmax(-1)[..., : length - first], v.transpose(0, 1)).view_as(out[t])
    return out
