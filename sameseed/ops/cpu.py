"""The native CPU backend: C++ kernels for AVX-512, AVX2 and any other processor, chosen when the first one runs.

All instruction sets and all numbers of threads give the same bits (csrc/kernels.h says in which order sums run). The
environment variable SAMESEED_ISA forces `avx512bf16`, `avx512vnni`, `avx512`, `avxvnni`, `avx2`, `portable` or `amx`.

This layer checks shapes and types and passes addresses: a call costs a few microseconds, which small models feel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.errors import ConfigError
from sameseed.ops import _outliers, _packed, _super
from sameseed.ops._rows import RowSource, plain_rows
from sameseed.scheme import KQUANTS, KVLayer, QuantTensor, round_rows

try:
    from sameseed import _native
except ImportError as error:
    _missing: str | None = (
        f"the native module is not built ({error}); run `make build`, or `pip install` the package again"
    )
else:
    _missing = None

row_invariant = True
DEVICES = frozenset({"cpu"})
_CODES = {"fp32": 0, "bf16": 1, "fp16": 2}  # enum Format in csrc/kernels.h
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Formats whose kernels take float rows; `serves` knows of weights that want their rows quantized as well.
LINEAR_FORMATS = frozenset(_CODES) | {name for name, rows in _packed.SERVED if rows is None}
_KV = {  # enum KvFormat in csrc/kernels.h, and the type of a code
    "fp32": (0, torch.float32),
    "bf16": (1, torch.bfloat16),
    "fp16": (2, torch.float16),
    "int8": (3, torch.int8),
    "fp8_e4m3": (4, torch.uint8),
    "fp8_e5m2": (5, torch.uint8),
    "int4": (6, torch.uint8),
    "int4_sparse": (7, torch.uint8),
    "bf16_a16": (8, torch.bfloat16),
    "int8_a8": (9, torch.int8),
}
_SCALED = frozenset(_KV) - _CODES.keys() - {"bf16_a16"}
KV_FORMATS = frozenset(_KV)
encode = _packed.encode
_F32, _I32 = torch.float32, torch.int32
_weights: dict[int, _native.Weight] = {}  # by id of the QuantTensor, as long as it lives
_views: dict[int, _outliers.Views] = {}  # likewise
_caches: dict[int, _native.Cache] = {}  # likewise, of the KVLayer
_MAX_DIM = 512  # max_dim in csrc/kernels.h
_NO_WINDOW = 1 << 40


def unavailable() -> str | None:
    """Why the native kernels cannot run here, with the remedy; None if they can."""
    if _missing is not None:
        return _missing
    try:
        _native.isa()
    except ValueError as error:
        return f"{error}; mend or unset SAMESEED_ISA"
    return None


def isa() -> str:
    """The instruction set in use: avx512bf16, avx512vnni, avx512, avxvnni, avx2, portable or amx."""
    return _native.isa()


def set_num_threads(threads: int) -> None:
    """Let each call use this many threads. Raises ConfigError below 1."""
    try:
        _native.set_num_threads(threads)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def num_threads() -> int:
    """Threads that a call of this thread may use."""
    return _native.num_threads()


def available_cores() -> int:
    """Physical cores that this process may use: its affinity mask, at most its cgroup's quota."""
    return _native.available_cores()


def limit_threads(threads: int) -> None:
    """Limit the threads of this thread's calls, which then are its own; 0: no limit. Raises ConfigError."""
    try:
        _native.limit_threads(threads)
    except ValueError as error:
        raise ConfigError(str(error)) from error


class Executor(NamedTuple):
    """Who runs ops: `calls` has the native functions, or is a Plan that records; `empty` makes room for results."""

    calls: Any
    empty: Callable[..., Tensor]


def replayer(forward: Any, ops: Any) -> Any:
    """`forward(ops, batch, cache, captures)` through recorded plans (ops/_replay.py); the same bits, less Python."""
    from sameseed.ops._replay import PlanReplay

    return PlanReplay(forward, ops)


_NOW = Executor(None if _missing else _native, partial(torch.empty, dtype=torch.float32))


def _floats(x: Tensor) -> Tensor:
    """`x` with its last dimensions packed; rows may be slices of wider ones. Raises TypeError unless float32."""
    if x.dtype is not _F32:
        raise TypeError(f"the cpu backend computes in float32, not in {x.dtype}")
    if x.is_contiguous():
        return x
    strides = x.stride()
    return x if strides[-1] == 1 and (len(strides) == 2 or strides[1] == x.shape[2]) else x.contiguous()


def _ints(x: Tensor) -> Tensor:
    return x if x.dtype is _I32 and x.is_contiguous() else x.to(_I32).contiguous()


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _fit(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise ValueError(f"{what}: {got} does not fit {wanted}")


T = TypeVar("T")


def _described(known: dict[int, T], x: Any, describe: Callable[[Any], T]) -> T:
    """The native description of `x`; made once, for its tensors never move."""
    made = known.get(id(x))
    if made is None:
        made = known[id(x)] = describe(x)
        weakref.finalize(x, known.pop, id(x), None)
    return made


def _weight(w: QuantTensor) -> _native.Weight:
    return _described(_weights, w, _dense_weight if w.layout == "plain" else _packer(w).describe)


def _vector(what: str, x: Tensor | None, length: int) -> Tensor | None:
    """`x` [length] for a kernel; None without one."""
    if x is None:
        return None
    x = _floats(x)
    _fit(what, x.shape[0], length)
    return x


def serves(w: QuantTensor) -> bool:
    """Whether a kernel takes this weight as it is stored."""
    if w.layout == "plain":
        return w.format in _DTYPES and w.activations is None
    return (w.format, w.activations) in _packed.SERVED


def _packer(w: QuantTensor) -> Any:
    return _super if w.format in KQUANTS else _packed


def pack(w: QuantTensor) -> QuantTensor:
    """`w` in blocks of 32 outputs as the kernels read it; itself where they take it as it is, or not at all."""
    packed: QuantTensor = _packer(w).pack(w)
    return packed


def unpack(w: QuantTensor) -> QuantTensor:
    """The inverse of pack."""
    plain: QuantTensor = _packer(w).unpack(w)
    return plain


def has_kernel(name: str, activations: str | None) -> bool:
    """Whether there is a kernel for weights in format `name` and rows of these activations."""
    return name in _DTYPES or (name, activations) in _packed.SERVED


def _dense_weight(w: QuantTensor) -> _native.Weight:
    weight = w.parts["weight"]
    if weight.dtype is not _DTYPES[w.format] or not weight.is_cpu:
        raise TypeError(f"a weight in {w.format} cannot be {weight.dtype} on {weight.device} here")
    if weight.stride(1) != 1 or tuple(weight.shape) != w.shape:
        raise ValueError(f"the rows of a weight {w.shape} must be packed, not {tuple(weight.shape)}, {weight.stride()}")
    return _packed.native_weight(w, _CODES[w.format], weight, weight.stride(0))


def embedding(token_ids: Tensor, w: QuantTensor, on: Executor = _NOW) -> Tensor:
    """Rows of an embedding [V, C] for token_ids [T]; returns float32 [T, C]. Raises IndexError outside 0..V-1."""
    ids = _ints(token_ids)
    rows = ids.shape[0]
    out = on.empty(rows, w.shape[1])
    on.calls.embedding(_native.Embedding(token_ids=ids.data_ptr(), weight=_weight(w), out=out.data_ptr(), rows=rows))
    return out


_SOURCES = {"plain": 0, "norm": 1, "silu": 2}  # RowSource::Kind in csrc/linear.h


def product(
    rows: RowSource,
    w: QuantTensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    on: Executor = _NOW,
) -> Tensor:
    """Rows [T, K] times w [O, K] transposed, plus bias [O], plus residual [T, O]; returns [T, O].

    Rows for fp8 activations are rounded here, and outliers split off, which no plan can record.
    """
    if w.activations == "outliers":
        x = rows.prepared(rms_norm, silu_mul)
        return _outliers.product(product, x, _described(_views, w, _outliers.views), bias, residual)
    if w.activations == "fp8":
        rows = plain_rows(round_rows(rows.prepared(rms_norm, silu_mul), w.group))
    outputs, depth = w.shape
    x, norm, bias = _floats(rows.x), _vector("norm weight", rows.norm, depth), _vector("bias", bias, outputs)
    if x.shape[1] != (2 * depth if rows.kind == "silu" else depth):
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight {w.shape}")
    row_ids = None if rows.row_ids is None else _ints(rows.row_ids)
    count = (x if row_ids is None else row_ids).shape[0]
    if residual is not None and (
        residual.dtype is not _F32 or not residual.is_contiguous() or residual.shape != (count, outputs)
    ):
        raise ValueError(f"a residual {tuple(residual.shape)} must be contiguous float32 {(count, outputs)}")
    source = _native.RowSource(
        kind=_SOURCES[rows.kind],
        x=x.data_ptr(),
        stride=x.stride(0),
        norm_weight=_at(norm),
        eps=rows.eps,
        index=_at(row_ids),
        index_limit=x.shape[0],
    )
    out = on.empty(count, outputs)
    added = {"bias": _at(bias), "residual": _at(residual)}
    on.calls.product(_native.Product(source=source, weight=_weight(w), **added, out=out.data_ptr(), rows=count))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, C] divided by its root mean square over C, times weight [C] (Zhang and Sennrich, 2019)."""
    x, weight = _floats(x), _floats(weight)
    rows, width = x.shape
    _fit("norm weight", weight.shape[0], width)
    out = torch.empty(rows, width, dtype=_F32)
    _native.rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), eps, out.data_ptr(), rows, width)
    return out


def norm_call(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Callable[[int], None]:
    """rms_norm of the first rows of x [T, C] into `out`, to be called with their number as often as wanted."""
    x_at, stride, width = x.data_ptr(), x.stride(0), x.shape[1]
    _fit("norm weight", weight.shape[0], width)
    weight_at, out_at = weight.data_ptr(), out.data_ptr()
    return lambda rows: _native.rms_norm(x_at, stride, weight_at, eps, out_at, rows, width)


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate x [T, H, D] by position (Su et al., 2021). table [P, D]: cosines, then sines. IndexError beyond it."""
    x, positions, table = _floats(x), _ints(positions), table.contiguous()
    rows, heads, dim = x.shape
    _fit("rope table and positions", (table.shape[1], positions.shape[0]), (dim, rows))
    out = torch.empty(rows, heads, dim, dtype=_F32)
    _native.rope(
        x.data_ptr(),
        x.stride(0),
        positions.data_ptr(),
        table.data_ptr(),
        table.shape[0],
        out.data_ptr(),
        rows,
        heads,
        dim,
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of gate_up [T, 2I] times the second; returns [T, I] (SwiGLU: Shazeer, 2020)."""
    gate_up = _floats(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=_F32)
    _native.silu_mul(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, width)
    return out


@cache
def _head_dim(code: int, width: int) -> int:
    """Head dimension of rows of `width` elements in a cache of that format code. Raises ValueError where none fits."""
    if code not in (_KV["int4"][0], _KV["int4_sparse"][0]):
        return width
    for dim in range(2, _MAX_DIM + 1, 2):
        if _native.kv_row_bytes(code, dim) == width:
            return dim
    raise ValueError(f"no head dimension up to {_MAX_DIM} has rows of {width} bytes in this cache")


def _cache(layer: KVLayer) -> _native.Cache:
    return _described(_caches, layer, _describe_cache)


def _describe_cache(layer: KVLayer) -> _native.Cache:
    k, v = layer.k, layer.v
    code, dtype = _KV[layer.format]
    if k.dtype is not dtype or v.dtype is not dtype or not k.is_contiguous() or not v.is_contiguous():
        raise TypeError(f"a KV cache in {layer.format} must be contiguous {dtype} tensors")
    _fit("v", v.shape, k.shape)
    num_blocks, block_size, kv_heads, width = k.shape
    scales = (layer.k_scale, layer.v_scale) if layer.format in _SCALED else ()
    for scale in scales:
        if scale is None or scale.dtype is not _F32 or not scale.is_contiguous():
            raise TypeError(f"scales of a KV cache in {layer.format} must be contiguous float32 tensors")
        _fit("scales", scale.shape, k.shape[:3])
    k_scale, v_scale = (_at(x) for x in scales or (None, None))
    return _native.Cache(
        k=k.data_ptr(),
        v=v.data_ptr(),
        k_scale=k_scale,
        v_scale=v_scale,
        num_slots=num_blocks * block_size,
        kv_heads=kv_heads,
        dim=_head_dim(code, width),
        format=code,
    )


def store_kv(k: Tensor, v: Tensor, layer: KVLayer, slots: Tensor) -> None:
    """Encode k, v [T, Hk, D] into the cache rows slots [T], rounding to nearest even. IndexError outside the cache.

    Scales are those of the row and head alone: the formats' `encode_kv` says which.
    """
    k, v, slots = _floats(k), _floats(v), _ints(slots)
    _fit("k", k.shape, (slots.shape[0], layer.k.shape[2], _head_dim(_KV[layer.format][0], layer.k.shape[3])))
    _fit("v", v.shape, k.shape)
    k_at, v_at, slots_at = k.data_ptr(), v.data_ptr(), slots.data_ptr()
    _native.store_kv(k_at, k.stride(0), v_at, v.stride(0), _cache(layer), slots_at, k.shape[0])


def rope_store(
    qkv: Tensor,
    heads: int,
    layer: KVLayer,
    batch: Batch,
    table: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    on: Executor = _NOW,
) -> Tensor:
    """Rotate q and k of qkv [T, (H + 2 Hk) D], store k and v in the cache, return q [T, H, D].

    With `norms` q and k are normed by head first. Bit for bit rms_norm, rope and store_kv. Raises as these do.
    """
    qkv, positions, slots = _floats(qkv), _ints(batch.positions), _ints(batch.slots)
    kv_heads, dim = layer.k.shape[2], _head_dim(_KV[layer.format][0], layer.k.shape[3])
    rows = qkv.shape[0]
    _fit("qkv", qkv.shape[1], (heads + 2 * kv_heads) * dim)
    _fit("rope table, positions and slots", (table.shape[1], positions.shape[0], slots.shape[0]), (dim, rows, rows))
    q_norm, k_norm = (_vector("norm weights", x, dim) for x in norms or (None, None))
    table = table.contiguous()
    out = on.empty(rows, heads, dim)
    on.calls.rope_store(
        _native.RopeStore(
            qkv=qkv.data_ptr(),
            stride=qkv.stride(0),
            heads=heads,
            q_norm=_at(q_norm),
            k_norm=_at(k_norm),
            eps=eps,
            positions=positions.data_ptr(),
            table=table.data_ptr(),
            table_rows=table.shape[0],
            slots=slots.data_ptr(),
            cache=_cache(layer),
            q_out=out.data_ptr(),
            rows=rows,
        )
    )
    return out


def move_kv(layer: KVLayer, src: Tensor, dst: Tensor) -> None:
    """Copy cache rows src [n] to dst [n]; all are read before any is written."""
    src, dst = _ints(src), _ints(dst)
    _fit("targets", dst.shape, src.shape)
    _native.move_kv(_cache(layer), src.data_ptr(), dst.data_ptr(), src.shape[0])


def _batch(batch: Batch, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Positions, row offsets, lengths, block tables and tree mask of a batch as a kernel reads them."""
    at = batch.positions if batch.key_positions is None else batch.key_positions
    positions, offsets, kv_lens = _ints(at), _ints(batch.row_offsets), _ints(batch.kv_lens)
    tables, mask = _ints(batch.block_tables), batch.tree_mask
    num_seqs = tables.shape[0]
    if positions.shape[0] != rows or offsets.shape[0] != num_seqs + 1 or kv_lens.shape[0] != num_seqs:
        raise ValueError(f"q has {rows} rows; the batch {positions.shape[0]} rows, {num_seqs} block tables")
    if mask is not None and (mask.dtype is not torch.int64 or mask.shape[0] != rows or not mask.is_contiguous()):
        raise ValueError("tree_mask must be contiguous int64 [T]")
    return positions, offsets, kv_lens, tables, mask


def attention_rounding(name: str) -> float:
    """What is lost of softmax weights that are rounded, over the largest value: see `Ops.kv_rounding`.

    In bf16: 2^-8 of each. In integers up to 32767: half a step of each of a block's 256.
    """
    return 2.0**-8 if name in ("bf16_a16", "int8_a8") else 0.0


def attention(
    q: Tensor, layer: KVLayer, batch: Batch, scale: float, window: int | None = None, on: Executor = _NOW
) -> Tensor:
    """Grouped-query attention of q [T, H, D] over the paged cache; returns [T, H, D]. Causal, with trees and a window.

    Raises IndexError or ValueError for offsets, blocks, positions or masks that contradict each other.
    """
    q = _floats(q)
    rows, heads, dim = q.shape
    _, block_size, kv_heads, width = layer.k.shape
    depth = _head_dim(_KV[layer.format][0], width)
    if depth != dim or heads % kv_heads or dim > _MAX_DIM:
        shapes = f"q {tuple(q.shape)} does not fit a cache {tuple(layer.k.shape)}"
        raise ValueError(f"{shapes} (head dim at most {_MAX_DIM})")
    positions, offsets, kv_lens, tables, mask = _batch(batch, rows)
    sequences = _native.Sequences(
        row_offsets=offsets.data_ptr(),
        kv_lens=kv_lens.data_ptr(),
        block_tables=tables.data_ptr(),
        count=tables.shape[0],
        table_stride=tables.shape[1],
        rows=rows,
    )
    out = on.empty(rows, heads, dim)
    on.calls.attention(
        _native.Attention(
            q=q.data_ptr(),
            stride=q.stride(0),
            heads=heads,
            cache=_cache(layer),
            block_size=block_size,
            positions=positions.data_ptr(),
            tree_mask=_at(mask),
            sequences=sequences,
            scale=scale,
            window=_NO_WINDOW if window is None else window,
            out=out.data_ptr(),
        )
    )
    return out
