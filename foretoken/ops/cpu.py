"""The native CPU backend: C++ kernels for AVX-512, AVX2 and any other processor, chosen when the first one runs.

All instruction sets and all numbers of threads give the same bits (csrc/kernels.h says in which order sums run). The
environment variable FORETOKEN_ISA forces `avx512`, `avx2` or `portable`.

This layer checks shapes and types and passes addresses: a call costs a few microseconds, which small models feel.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from foretoken import registry
from foretoken.batch import Batch
from foretoken.errors import ConfigError
from foretoken.formats.scheme import KVLayer, QuantTensor

try:
    from foretoken import _native
except ImportError as error:
    _missing: str | None = (
        f"the native module is not built ({error}); run `make build`, or `pip install` the package again"
    )
else:
    _missing = None

row_invariant = True
_CODES = {"fp32": 0, "bf16": 1, "fp16": 2}  # enum Format in csrc/kernels.h
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LINEAR_FORMATS = frozenset(_CODES)
_KV = {  # enum KvFormat in csrc/kernels.h, and the type of a code
    "fp32": (0, torch.float32),
    "bf16": (1, torch.bfloat16),
    "fp16": (2, torch.float16),
    "int8": (3, torch.int8),
    "fp8_e4m3": (4, torch.uint8),
    "fp8_e5m2": (5, torch.uint8),
}
_SCALED = frozenset({"int8", "fp8_e4m3", "fp8_e5m2"})
KV_FORMATS = frozenset(_KV) & frozenset(registry.names("formats"))
_F32, _I32 = torch.float32, torch.int32
_Weight = tuple[int, int, int, int, int]
_weights: dict[int, _Weight] = {}  # by id of the QuantTensor, as long as it lives
_MAX_DIM = 512  # max_dim in csrc/kernels.h
_NO_WINDOW = 1 << 40


def unavailable() -> str | None:
    """Why the native kernels cannot run here, with the remedy; None if they can."""
    if _missing is not None:
        return _missing
    try:
        _native.isa()
    except ValueError as error:
        return f"{error}; mend or unset FORETOKEN_ISA"
    return None


def isa() -> str:
    """The instruction set in use: avx512, avx2 or portable."""
    return _native.isa()


def set_num_threads(threads: int) -> None:
    """Let each call use this many threads. Raises ConfigError below 1."""
    try:
        _native.set_num_threads(threads)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _floats(x: Tensor) -> Tensor:
    """`x` with its last dimensions packed; rows may be slices of wider ones. Raises TypeError unless float32."""
    if x.dtype is not _F32:
        raise TypeError(f"the cpu backend computes in float32, not in {x.dtype}")
    if x.is_contiguous():
        return x
    strides = x.stride()
    return x if strides[-1] == 1 and (len(strides) == 2 or strides[1] == x.shape[2]) else x.contiguous()


def _row_stride(x: Tensor) -> int:
    """Elements from one row of `x` to the next."""
    return x.stride()[0]


def _ints(x: Tensor) -> Tensor:
    """`x` as contiguous int32."""
    return x if x.dtype is _I32 and x.is_contiguous() else x.to(_I32).contiguous()


def _fit(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise ValueError(f"{what}: {got} does not fit {wanted}")


def _weight(w: QuantTensor) -> _Weight:
    """Address, row stride, format code, O and K of a dense weight; looked up once, for it never moves."""
    known = _weights.get(id(w))
    if known is not None:
        return known
    weight = w.parts["weight"]
    if weight.dtype is not _DTYPES[w.format] or not weight.is_cpu:
        raise TypeError(f"a weight in {w.format} cannot be {weight.dtype} on {weight.device} here")
    if weight.stride(1) != 1 or tuple(weight.shape) != w.shape:
        raise ValueError(f"the rows of a weight {w.shape} must be packed, not {tuple(weight.shape)}, {weight.stride()}")
    known = (weight.data_ptr(), weight.stride(0), _CODES[w.format], *w.shape)
    weakref.finalize(w, _weights.pop, id(w), None)
    _weights[id(w)] = known
    return known


def embedding(token_ids: Tensor, w: QuantTensor) -> Tensor:
    """Rows of an embedding [V, C] for token_ids [T]; returns float32 [T, C]. Raises IndexError outside 0..V-1."""
    ids = _ints(token_ids)
    weight, stride, code, vocabulary, width = _weight(w)
    rows = ids.shape[0]
    out = torch.empty(rows, width, dtype=_F32)
    _native.embedding(ids.data_ptr(), weight, stride, code, out.data_ptr(), rows, vocabulary, width)
    return out


def linear(x: Tensor, w: QuantTensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times w [O, K] transposed, plus bias [O]; returns [T, O]."""
    x = _floats(x)
    weight, stride, code, outputs, depth = _weight(w)
    rows, width = x.shape
    if width != depth:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight {w.shape}")
    bias_at = 0
    if bias is not None:
        bias = _floats(bias)
        _fit("bias", bias.shape[0], outputs)
        bias_at = bias.data_ptr()
    out = torch.empty(rows, outputs, dtype=_F32)
    at = out.data_ptr()
    _native.linear(x.data_ptr(), _row_stride(x), weight, stride, code, bias_at, at, rows, outputs, depth)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, C] divided by its root mean square over C, times weight [C] (Zhang and Sennrich, 2019)."""
    x, weight = _floats(x), _floats(weight)
    rows, width = x.shape
    _fit("norm weight", weight.shape[0], width)
    out = torch.empty(rows, width, dtype=_F32)
    _native.rms_norm(x.data_ptr(), _row_stride(x), weight.data_ptr(), eps, out.data_ptr(), rows, width)
    return out


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate x [T, H, D] by position (Su et al., 2021). table [P, D]: cosines, then sines. IndexError beyond it."""
    x, positions, table = _floats(x), _ints(positions), table.contiguous()
    rows, heads, dim = x.shape
    _fit("rope table and positions", (table.shape[1], positions.shape[0]), (dim, rows))
    out = torch.empty(rows, heads, dim, dtype=_F32)
    _native.rope(
        x.data_ptr(),
        _row_stride(x),
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
    _native.silu_mul(gate_up.data_ptr(), _row_stride(gate_up), out.data_ptr(), rows, width)
    return out


def _cache(layer: KVLayer) -> tuple[int, int, int, int, int, int, int, int]:
    """Addresses of k, v and their scales (0 without), number of slots, KV heads, head dim, format code."""
    k, v, k_scale, v_scale = layer.k, layer.v, layer.k_scale, layer.v_scale
    code, dtype = _KV[layer.format]
    if k.dtype is not dtype or v.dtype is not dtype or not k.is_contiguous() or not v.is_contiguous():
        raise TypeError(f"a KV cache in {layer.format} must be contiguous {dtype} tensors")
    _fit("v", v.shape, k.shape)
    num_blocks, block_size, kv_heads, dim = k.shape
    scales = (0, 0)
    if layer.format in _SCALED:
        for scale in (k_scale, v_scale):
            if scale is None or scale.dtype is not _F32 or not scale.is_contiguous():
                raise TypeError(f"scales of a KV cache in {layer.format} must be contiguous float32 tensors")
            _fit("scales", scale.shape, k.shape[:3])
        assert k_scale is not None and v_scale is not None
        scales = k_scale.data_ptr(), v_scale.data_ptr()
    return k.data_ptr(), v.data_ptr(), *scales, num_blocks * block_size, kv_heads, dim, code


def store_kv(k: Tensor, v: Tensor, layer: KVLayer, slots: Tensor) -> None:
    """Encode k, v [T, Hk, D] into the cache rows slots [T], rounding to nearest even. IndexError outside the cache.

    Scales are those of the row and head alone: the formats' `encode_kv` says which.
    """
    k, v, slots = _floats(k), _floats(v), _ints(slots)
    _fit("k", k.shape, (slots.shape[0], *layer.k.shape[2:]))
    _fit("v", v.shape, k.shape)
    k_at, v_at, slots_at = k.data_ptr(), v.data_ptr(), slots.data_ptr()
    _native.store_kv(k_at, _row_stride(k), v_at, _row_stride(v), *_cache(layer), slots_at, k.shape[0])


def move_kv(layer: KVLayer, src: Tensor, dst: Tensor) -> None:
    """Copy cache rows src [n] to dst [n]; all are read before any is written."""
    src, dst = _ints(src), _ints(dst)
    _fit("targets", dst.shape, src.shape)
    _native.move_kv(*_cache(layer), src.data_ptr(), dst.data_ptr(), src.shape[0])


def attention(q: Tensor, layer: KVLayer, batch: Batch, scale: float, window: int | None = None) -> Tensor:
    """Grouped-query attention of q [T, H, D] over the paged cache; returns [T, H, D]. Causal, with trees and a window.

    Raises IndexError or ValueError for offsets, blocks, positions or masks that contradict each other.
    """
    q = _floats(q)
    rows, heads, dim = q.shape
    _, block_size, kv_heads, depth = layer.k.shape
    if depth != dim or heads % kv_heads or dim > _MAX_DIM:
        raise ValueError(
            f"q {tuple(q.shape)} does not fit a cache {tuple(layer.k.shape)} (head dim at most {_MAX_DIM})"
        )
    positions, offsets, kv_lens = _ints(batch.positions), _ints(batch.row_offsets), _ints(batch.kv_lens)
    tables, mask = _ints(batch.block_tables), batch.tree_mask
    num_seqs, table_width = tables.shape
    if positions.shape[0] != rows or offsets.shape[0] != num_seqs + 1 or kv_lens.shape[0] != num_seqs:
        raise ValueError(f"q has {rows} rows; the batch {positions.shape[0]} rows, {num_seqs} block tables")
    if mask is not None and (mask.dtype is not torch.int64 or mask.shape[0] != rows or not mask.is_contiguous()):
        raise ValueError("tree_mask must be contiguous int64 [T]")
    out = torch.empty(rows, heads, dim, dtype=_F32)
    _native.attention(
        q.data_ptr(),
        _row_stride(q),
        *_cache(layer),
        block_size,
        heads,
        positions.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        offsets.data_ptr(),
        kv_lens.data_ptr(),
        tables.data_ptr(),
        table_width,
        num_seqs,
        rows,
        scale,
        _NO_WINDOW if window is None else window,
        out.data_ptr(),
    )
    return out
