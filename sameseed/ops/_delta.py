"""Gated DeltaNet and gated attention on the CPU backend: shapes are checked, then csrc/delta.cpp is called."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from sameseed.batch import Batch
from sameseed.ops._native_rows import NOW, Executor, address, check_fit, floats, ints

with suppress(ImportError):  # cpu.py then says that the module is missing
    from sameseed import _native


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """Weights of a Gated DeltaNet layer besides its matrices, all float32.

    `tiled`: value head h reads key head h modulo their number, as in GGUF files; else neighbours share a key head.
    """

    conv: Tensor  # [taps, 2 Hk K + H D]
    decay: Tensor  # [H]: -exp(A_log)
    bias: Tensor  # [H]: dt_bias
    norm: Tensor  # [D]
    eps: float
    tiled: bool = False


@dataclass(frozen=True, eq=False)
class StateLayer:
    """States of one layer: state float32 [slots, H, K, D], log float32 [slots, rows, 2 Hk K + H D + 2 H]."""

    state: Tensor
    log: Tensor


def take(x: Tensor, index: Tensor, on: Executor = NOW) -> Tensor:
    """Columns `index` int32 [n] of x [T, K], in this order: [T, n]."""
    x, index = floats(x), ints(index)
    out = on.empty(x.shape[0], len(index))
    where = {"x": x.data_ptr(), "stride": x.stride(0), "index": index.data_ptr(), "width": len(index)}
    on.calls.take(_native.Take(**where, out=out.data_ptr(), rows=x.shape[0]))
    return out


def gate(x: Tensor, gates: Tensor, heads: int, on: Executor = NOW) -> Tensor:
    """x [T, H D] times the sigmoid of its heads' gates, the last D columns of each head of gates [T, ...]."""
    x, gates = floats(x), floats(gates)
    rows, dim, apart = x.shape[0], x.shape[1] // heads, gates.shape[1] // heads
    out = on.empty(rows, heads * dim)
    first = gates.data_ptr() + (apart - dim) * gates.element_size()
    shape = {"heads": heads, "dim": dim, "apart": apart, "rows": rows}
    on.calls.gate(_native.SigmoidGate(x=x.data_ptr(), gate=first, stride=gates.stride(0), **shape, out=out.data_ptr()))
    return out


def delta(x: Tensor, w: DeltaWeights, layer: StateLayer, batch: Batch, on: Executor = NOW) -> Tensor:
    """Gated DeltaNet of rows x, as `reference.delta`. Raises IndexError for rows that do not fit the states."""
    x = floats(x)
    slots, heads, depth, dim = layer.state.shape
    taps, width = w.conv.shape
    check_fit("rows", x.shape[1], width + heads * dim + 2 * heads)
    check_fit("log", layer.log.shape[2], width + 2 * heads)
    if dim % 16 or depth % 2 or (width - heads * dim) % (2 * depth) or taps > 8:
        raise ValueError(f"states of {depth} x {dim} values and {taps} columns have no kernel")
    offsets, positions, states = ints(batch.row_offsets), ints(batch.positions), batch.states
    out = on.empty(x.shape[0], 2 * heads * dim)
    on.calls.delta(
        _native.DeltaRule(
            x=x.data_ptr(),
            stride=x.stride(0),
            conv=w.conv.data_ptr(),
            decay=w.decay.data_ptr(),
            bias=w.bias.data_ptr(),
            norm=w.norm.data_ptr(),
            eps=w.eps,
            taps=taps,
            key_heads=(width - heads * dim) // (2 * depth),
            value_heads=heads,
            key_dim=depth,
            value_dim=dim,
            tiled=w.tiled,
            state=layer.state.data_ptr(),
            log=layer.log.data_ptr(),
            slots=slots,
            log_rows=layer.log.shape[1],
            states=address(states),
            row_offsets=offsets.data_ptr(),
            positions=positions.data_ptr(),
            num_seqs=len(offsets) - 1,
            rows=x.shape[0],
            out=out.data_ptr(),
        )
    )
    return out
