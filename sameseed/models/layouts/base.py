"""Shared code of the layouts: `StoredMatrix`, the view of a checkpoint's tensors, supported groups, packed integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sameseed.errors import ConfigError, ModelLoadError, say_once
from sameseed.models.config import whole_number
from sameseed.scheme import CHANNEL, GROUPS, KQUANTS, QuantScheme, QuantTensor, get

REMEDY = "take another checkpoint, or the unquantized model and --format"
FLOATS = ("F32", "BF16", "F16")
# Name endings of static scales of the KV cache, which are not read: our scales are per row.
CACHE = tuple(f".{x}_{part}" for x in ("k", "v", "q", "kv") for part in ("scale", "zero_point"))
# 8-bit float codes of at least this value, ignoring the sign, are NaN or infinity (Micikevicius et al., 2022, table 1).
ENDS = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7C}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "mxfp4": 6.0, "nf4": 1.0}  # largest code value; 256 for integers
LARGEST |= dict.fromkeys(KQUANTS, 2.0**14)  # steps of up to 128, and as much again for the minima
ROWS = 1024  # rows that are processed together, so that temporary copies are small
ROUNDED = "int8", 32  # format and group for matrices that no kernel supports: errors of about 0.5 % of the weights


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix, checked but not read.

    `tensors`: names of the tensors it consists of. `scheme`: the scheme to keep it in. `read`: reads the codes. Where
    none of our formats holds the codes (`why` describes them), `read` returns the decoded matrix float32 [O, K], to be
    rounded to `scheme`.
    """

    tensors: tuple[str, ...]
    scheme: QuantScheme
    read: Callable[[], QuantTensor | Tensor]
    why: str = ""


class Files(Protocol):
    """The interface through which a layout reads a checkpoint's tensors."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type (safetensors name) and shape of a tensor."""

    def raw(self, name: str, index: int | None = None) -> Tensor:
        """A tensor as stored, or entry `index` of its first axis; float tensors are checked to be finite."""

    def octets(self, name: str) -> Tensor:
        """The bytes of a tensor of any type: uint8, flat."""

    def expect(self, name: str, dtypes: Seq[str], *shapes: tuple[int, ...]) -> str:
        """Return `name`. Raises ModelLoadError unless the tensor exists with one of the types and one of the shapes."""


class Layout:
    """A quant_method with its settings.

    `unread`: name endings of tensors that are not read: static scales of activations (our scales are per row).
    """

    unread: tuple[str, ...] = ()
    where = ""

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        """How matrix `name` (without ".weight") of this shape is stored; None: dense. Raises ModelLoadError."""
        raise NotImplementedError

    def spare(self, name: str, files: Files) -> bool:
        """Whether a tensor that belongs to no matrix may be ignored."""
        if self.unread and name.endswith(self.unread):
            float_rows(self.where)
        return name.endswith(self.unread)


def cache_scale(name: str, where: str) -> bool:
    """Whether a tensor is a static scale of the KV cache, in any layout; logs once that it is left out."""
    if name.endswith(CACHE):
        say_once(f"{where}: its scales for the KV cache are left out; here they are per token and head (--kv-format)")
    return name.endswith(CACHE)


def float_rows(where: str) -> None:
    """Log once that a checkpoint's settings for activations are ignored."""
    say_once(f"{where}: its settings for activations are left out: rows stay float32; only 8 bits by token are kept")


def round_scheme(width: int) -> QuantScheme:
    """The scheme that matrices of `width` columns are rounded to if no kernel supports their own."""
    name, group = ROUNDED
    return QuantScheme(name, group if width % group == 0 else None)


def rounded(scheme: QuantScheme, height: int, rows: Callable[[int, int], Tensor]) -> QuantTensor:
    """Encode a matrix of `height` rows in a scheme, some rows at a time; `rows(start, stop)` returns them."""
    pieces = [scheme.encode(rows(i, min(i + ROWS, height))) for i in range(0, height, ROWS)]
    return get(scheme.weights).concat(pieces)


def group_size(config: Mapping[str, Any], default: int, where: str) -> int | None:
    """The number of values that share a scale; None: a whole row. Raises ModelLoadError."""
    group = whole_number(config, where, "group_size", default, -1)
    if group == 0:
        raise ModelLoadError(f"{where}: group_size 0 is none")
    return None if group == -1 else group


def two_sizes(value: object, where: str) -> tuple[int, int]:
    """The rows and columns of a block. Raises ModelLoadError."""
    if not isinstance(value, list) or len(value) != 2 or any(type(v) is not int or not 0 < v < 2**20 for v in value):
        raise ModelLoadError(f"{where} must be two sizes, got {str(value)[:80]}")
    return value[0], value[1]


def keep(
    name: str, width: int, group: int | None, symmetric: bool = True, activations: str | None = None
) -> tuple[QuantScheme, int] | None:
    """The scheme that keeps codes of format `name` in groups of `group` (None: rows), and how often a scale repeats.

    Kernels support whole rows and groups of 32, 64 and 128. A larger group is split into groups of 128 that repeat its
    scale. None where no supported group fits.
    """
    group = None if group == width and group not in GROUPS else group
    if group is not None and (width % group or (group not in GROUPS and group % GROUPS[-1])):
        return None
    kept = None if group is None else min(group, GROUPS[-1])
    own = CHANNEL if group is None and get(name).groups else kept  # otherwise the format would choose a group
    try:
        return QuantScheme(name, own, symmetric, activations), (group or width) // (kept or width)
    except ConfigError:
        return None


Parts = Callable[[], tuple[Tensor, Tensor, "Tensor | None"]]


def stored(
    tensors: Seq[str],
    bits: int,
    parts: Parts,
    width: int,
    group: int | None,
    why: str,
    symmetric: bool = True,
    activations: str | None = None,
    index: Tensor | None = None,
) -> StoredMatrix:
    """A matrix [O, K] of integer codes of 4 or 8 bits: in a scheme of ours, or decoded where none holds them.

    `parts()` reads codes [O, K], scales [O, n] and zero points [O, n], or None where these are 0 for signed codes and
    the middle for unsigned ones. `index` [K]: the group of each column, if the groups are not in order (act-order).
    Such a matrix is kept with sorted columns if all groups are full. `why`: description of the codes, to which the
    group is added.
    """
    kept = None
    if symmetric or bits == 4:  # no format has 8 bits with zero points
        kept = keep("int4" if bits == 4 else "int8", width, group, symmetric, activations)
    in_order = torch.arange(width) // (group or width)
    groups = in_order if index is None else index.long()
    order = None if index is None else groups.argsort(stable=True)
    looked_up = tensors[0].startswith("model.embed_tokens.")  # embedding kernels do not support a column order
    if order is not None and (looked_up or not groups[order].equal(in_order)):
        kept, why = None, f"{why} with act-order"
    if kept is None:
        what = f"{why} in rows" if group in (None, width) else f"{why} in groups of {group}"
        return StoredMatrix(tuple(tensors), round_scheme(width), lambda: by_group(*parts(), groups, bits), what)
    scheme, times = kept

    def read() -> QuantTensor:
        codes, scales, zeros = parts()
        codes = codes if order is None else codes.index_select(1, order)
        if bits == 8 and codes.dtype == torch.uint8:
            codes = (codes ^ 128).view(torch.int8)
        found = {"codes": codes, "scales": spread(scales, times).contiguous()}
        if scheme.weights == "int8" and found["scales"].shape[1] == 1:
            found["scales"] = found["scales"].float()
        if zeros is not None:
            found["zeros"] = spread(zeros, times).contiguous()
        return QuantTensor(scheme.weights, (codes.shape[0], width), found, scheme.activations, order=order)

    return StoredMatrix(tuple(tensors), scheme, read)


def spread(x: Tensor, times: int) -> Tensor:
    """x [O, n] with each column repeated: [O, n * times]."""
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def nibbles(packed: Tensor) -> Tensor:
    """Unpack int32 (uint8) [N, W] to 4-bit codes uint8 [N, 8 W] ([N, 2 W]), the lowest bits first."""
    data = packed.contiguous().view(torch.uint8)
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(1)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [N, W] to codes uint8 [N, 32 / bits * W], the lowest bits first; `bits` is 4 or 8."""
    return nibbles(packed) if bits == 4 else packed.contiguous().view(torch.uint8)


def e8m0(exponents: Tensor) -> Tensor:
    """Powers of two from their exponents + 127, bfloat16; 255 means NaN."""
    powers = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127).to(torch.bfloat16)
    return powers.masked_fill(exponents == 255, torch.nan)


def by_group(codes: Tensor, scales: Tensor, zeros: Tensor | None, index: Tensor, bits: int) -> Tensor:
    """(codes [O, K] - zeros [O, n]) * scales [O, n] as float32 [O, K], as in `stored`; column k uses group index[k]."""
    index, middle = index.long(), 0 if codes.dtype == torch.int8 else 1 << (bits - 1)
    offset = middle if zeros is None else zeros.float().index_select(1, index)
    return (codes.float() - offset).mul_(scales.float().index_select(1, index))


def column_groups(name: str, files: Files, size: int, count: int) -> Tensor | None:
    """The group of each column from tensor `name`; None if in order. Raises ModelLoadError for one out of range."""
    index = files.raw(name)
    if index.equal(torch.arange(len(index), dtype=index.dtype) // size):
        return None
    if index.min() < 0 or index.max() >= count:
        raise ModelLoadError(f"tensor {name} names groups outside 0..{count - 1}; the file is damaged")
    return index


def listed(config: Mapping[str, Any], where: str, *keys: str) -> list[str]:
    """The names in the lists under some keys, of which any may be missing. Raises ModelLoadError."""
    lists = {key: [] if config.get(key) is None else config[key] for key in keys}
    for key, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ModelLoadError(f"{where}: {key} must be a list of names, got {str(value)[:80]}")
    return [name for names in lists.values() for name in names]


def finite(value: QuantTensor | Tensor) -> bool:
    """Whether a matrix [O, K], decoded if it is quantized, is finite everywhere in float32."""
    if isinstance(value, Tensor):
        # The sum is a fast check, but it may overflow; then every value is checked.
        return bool(value.sum().isfinite()) or bool(value.isfinite().all())
    end = ENDS.get(value.format)
    for part in get(value.format).scale_parts:
        scales = value.parts.get(part)
        if scales is None or not scales.is_floating_point():
            continue
        bound = scales.abs().amax().double() * LARGEST.get(value.format, 256.0)  # NaN if any scale is NaN
        if not bound <= torch.finfo(torch.float32).max:
            return False
    if end is None:
        return True
    return all(bool(((rows & 0x7F) < end).all()) for rows in torch.split(value.parts["codes"], ROWS))
