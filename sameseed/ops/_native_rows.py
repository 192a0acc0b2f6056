"""Products and row-wise ops of the CPU backend: they check shapes and types and call the native kernels.

Descriptions of weights are cached, because the few microseconds of a call are noticeable with small models.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sameseed.ops._layout import FLOATS, SERVED, T, describe, native, native_weight
from sameseed.ops._rows import ExpertWeights, RowSource, outlier_product, outlier_views, plain_rows
from sameseed.scheme import QuantTensor, round_rows

with suppress(ImportError):  # cpu.py then says that the module is missing
    from sameseed import _native

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
F32 = torch.float32
_described: dict[tuple[Callable[..., Any], int], Any] = {}  # by what makes them, and the id of what exists meanwhile


class Executor(NamedTuple):
    """Runs or records ops: `calls` is the native module or a recording Plan; `empty` allocates results."""

    calls: Any
    empty: Callable[..., Tensor]


NOW = Executor(sys.modules.get("sameseed._native"), partial(torch.empty, dtype=torch.float32))


def floats(x: Tensor) -> Tensor:
    """`x` with contiguous rows, which may be slices of wider rows. Raises TypeError unless float32."""
    if x.dtype is not F32:
        raise TypeError(f"the cpu backend computes in float32, not in {x.dtype}")
    if x.is_contiguous():
        return x
    strides = x.stride()
    return x if strides[-1] == 1 and (len(strides) == 2 or strides[1] == x.shape[2]) else x.contiguous()


def ints(x: Tensor) -> Tensor:
    """`x` as contiguous int32."""
    return x if x.dtype is torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()


def check_fit(what: str, got: object, wanted: object) -> None:
    """Raise ValueError if two shapes differ."""
    if got != wanted:
        raise ValueError(f"{what}: {got} does not fit {wanted}")


def described(make: Callable[[Any], T], x: Any) -> T:
    """The native description `make(x)`. It is made once, because the tensors of `x` never move."""
    key = make, id(x)
    made: T | None = _described.get(key)
    if made is None:
        made = _described[key] = make(x)
        weakref.finalize(x, _described.pop, key, None)
    return made


def _weight(w: QuantTensor) -> _native.Weight:
    return described(_dense_weight if w.layout == "plain" else describe, w)


def vector(what: str, x: Tensor | None, length: int) -> Tensor | None:
    """`x` [length] as float32 for a kernel; None for None. Raises ValueError for another length."""
    if x is None:
        return None
    x = floats(x)
    check_fit(what, x.shape[0], length)
    return x


def serves(w: QuantTensor) -> bool:
    """Whether a kernel can read this weight in its present layout."""
    if w.layout == "plain":
        return w.format in DTYPES and w.activations is None
    return (w.format, w.activations) in SERVED


def _dense_weight(w: QuantTensor) -> _native.Weight:
    weight = w.parts["weight"]
    if weight.dtype is not DTYPES[w.format] or not weight.is_cpu:
        raise TypeError(f"a weight in {w.format} cannot be {weight.dtype} on {weight.device} here")
    if weight.stride(1) != 1 or tuple(weight.shape) != w.shape:
        raise ValueError(f"the rows of a weight {w.shape} must be packed, not {tuple(weight.shape)}, {weight.stride()}")
    return native_weight(w, FLOATS[weight.dtype], weight, weight.stride(0))


def embedding(token_ids: Tensor, w: QuantTensor, scale: float = 1.0, on: Executor = NOW) -> Tensor:
    """Rows token_ids [T] of an embedding [V, C], times `scale`, as float32 [T, C].

    Raises IndexError for ids outside 0..V-1.
    """
    ids = ints(token_ids)
    out = on.empty(ids.shape[0], w.shape[1])
    fields = {"token_ids": ids, "out": out, "weight": _weight(w), "scale": scale, "rows": ids.shape[0]}
    on.calls.embedding(native(_native.Embedding, **fields))
    return out


_INPUTS = frozenset({"plain", "norm"})  # of experts
_SOURCES = {"plain": 0, "norm": 1, "silu": 2, "gelu": 3, "clamped": 4}  # RowSource::Kind in csrc/linear.h


def product(
    rows: RowSource, w: QuantTensor, bias: Tensor | None = None, residual: Tensor | None = None, on: Executor = NOW
) -> Tensor:
    """Rows [T, K] times w [O, K] transposed, plus bias [O], plus residual [T, O]; returns [T, O].

    Rounds rows for fp8 activations and splits off outliers. A plan can record neither.
    """
    if w.activations == "outliers":
        x = rows.prepared(rms_norm, silu_mul, gelu_mul)
        return outlier_product(product, x, described(outlier_views, w), bias, residual)
    if w.activations == "fp8":
        rows = plain_rows(round_rows(rows.prepared(rms_norm, silu_mul, gelu_mul), w.group))
    outputs, depth = w.shape
    x, norm, bias = floats(rows.x), vector("norm weight", rows.norm, depth), vector("bias", bias, outputs)
    if rows.width != depth:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight {w.shape}")
    row_ids = None if rows.row_ids is None else ints(rows.row_ids)
    count = (x if row_ids is None else row_ids).shape[0]
    if residual is not None and (
        residual.dtype is not F32 or not residual.is_contiguous() or residual.shape != (count, outputs)
    ):
        raise ValueError(f"a residual {tuple(residual.shape)} must be contiguous float32 {(count, outputs)}")
    out = on.empty(count, outputs)
    fields = {"source": _source(rows, x, norm, row_ids), "weight": _weight(w), "out": out, "rows": count}
    on.calls.product(native(_native.Product, bias=bias, residual=residual, **fields))
    return out


def _source(rows: RowSource, x: Tensor, norm: Tensor | None, row_ids: Tensor | None) -> _native.RowSource:
    """The native description of rows, of which x, norm and row_ids are as kernels read them."""
    where = {"x": x, "stride": x.stride(0), "norm_weight": norm, "index": row_ids, "index_limit": x.shape[0]}
    return native(_native.RowSource, kind=_SOURCES[rows.kind], eps=rows.eps, limit=0.0, **where)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, C] divided by its root mean square over C, times weight [C] (Zhang and Sennrich, 2019)."""
    x, weight = floats(x), floats(weight)
    check_fit("norm weight", weight.shape[0], x.shape[1])
    out = torch.empty(x.shape, dtype=F32)
    native(_native.rms_norm, x, x.stride(0), weight, eps, out, *x.shape)
    return out


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate x [T, H, D] by position (Su et al., 2021). table [P, D]: cosines, then sines.

    Raises IndexError for positions beyond the table.
    """
    x, positions, table = floats(x), ints(positions), table.contiguous()
    rows, heads, dim = x.shape
    check_fit("rope table and positions", (table.shape[1], positions.shape[0]), (dim, rows))
    out = torch.empty(rows, heads, dim, dtype=F32)
    native(_native.rope, x, x.stride(0), positions, table, table.shape[0], out, rows, heads, dim)
    return out


def silu_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """silu of the first half of gate_up [T, 2I] times the second; returns [T, I] (SwiGLU; `limit`: gpt-oss's)."""
    if limit is None:
        return _gated(_native.silu_mul, gate_up)
    return _gated(_native.clamped_mul, gate_up, limit)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu (its tanh form) of the first half of gate_up [T, 2I] times the second; returns [T, I]."""
    return _gated(_native.gelu_mul, gate_up)


def _gated(kernel: Callable[..., None], gate_up: Tensor, *limit: float) -> Tensor:
    gate_up = floats(gate_up)
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=F32)
    native(kernel, gate_up, gate_up.stride(0), *limit, out, *out.shape)
    return out


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of x [R, V]."""
    out = floats(x).clone()
    native(_native.softcap, out, cap, *out.shape)
    return out


def experts(
    rows: RowSource,
    w: ExpertWeights,
    residual: Tensor | None = None,
    logits: Tensor | None = None,
    on: Executor = NOW,
) -> Tensor | None:
    """A mixture of experts of rows [T, C], plus residual; returns [T, C]. None if no kernel takes the weights.

    `logits` [T, E]: as in the reference.
    """
    groups = (w.gate_up, w.down)
    if not serves(w.router) or rows.kind not in _INPUTS or rows.row_ids is not None:
        return None
    for group in groups:  # experts are computed together, by one kernel
        first = group[0]
        kinds = {(m.format, m.activations, m.layout, m.group, m.shape, m.order is None) for m in group}
        if len(kinds) > 1 or not serves(first) or first.order is not None or first.activations in ("fp8", "outliers"):
            return None
    (num_experts, depth), inner = w.router.shape, w.down[0].shape[1]
    check_fit("gate_up and down", (w.gate_up[0].shape, w.down[0].shape), ((2 * inner, depth), (depth, inner)))
    check_fit("number of experts", (len(w.gate_up), len(w.down)), (num_experts, num_experts))
    x, norm = floats(rows.x), vector("norm weight", rows.norm, depth)
    check_fit("x", x.shape[1], depth)
    if residual is not None:
        check_fit("residual", (residual.is_contiguous(), residual.shape), (True, x.shape))
    biases = [(w.router_bias, 1), (w.gate_up_bias, 2 * inner), (w.down_bias, depth), (w.chosen_by, 1), (w.factors, 1)]
    for bias, width in biases:
        if bias is not None:
            check_fit("bias", (bias.dtype, bias.is_contiguous(), bias.numel()), (F32, True, num_experts * width))
    out = on.empty(*x.shape)
    weights = {"router": _weight(w.router), "set": described(_expert_set, w)}
    if logits is not None:
        check_fit("logits", (logits.is_contiguous(), logits.shape), (True, (len(x), num_experts)))
    names = ("router_bias", "gate_up_bias", "down_bias", "top_k", "normalize", "chosen_by", "factor", "factors")
    own = {name: getattr(w, name) for name in names} | {"logits": logits}
    gate = {"gate": _SOURCES[w.act if w.limit is None else "clamped"], "limit": w.limit or 0.0}
    fields = {"source": _source(rows, x, norm, None), "residual": residual, "out": out, "rows": x.shape[0]}
    on.calls.experts(native(_native.Experts, **fields, **weights, **own, **gate))
    return out


def _expert_set(w: ExpertWeights) -> _native.ExpertSet:
    return _native.ExpertSet(gate_up=[_weight(m) for m in w.gate_up], down=[_weight(m) for m in w.down])
