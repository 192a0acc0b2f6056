"""What the layouts share: `Stored`, the view of a checkpoint's tensors, groups that kernels have, packed integers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from sameseed.errors import ConfigError, ModelLoadError
from sameseed.models.config import whole_number
from sameseed.scheme import CHANNEL, GROUPS, KQUANTS, QuantScheme, QuantTensor, get

log = logging.getLogger("sameseed.models")
FLOATS = ("F32", "BF16", "F16")
# Codes of 8-bit floats, less their sign, from which on they are NaN or infinity (Micikevicius et al., 2022, table 1).
ENDS = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7C}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "mxfp4": 6.0, "nf4": 1.0}  # of a code; integers have up to 256
LARGEST |= dict.fromkeys(KQUANTS, 2.0**14)  # steps of up to 128, and as much again for the minima
ROWS = 1024  # looked at together, so that copies are small
ROUNDED = "int8", 32  # format and group of what no kernel has: errors of about 0.5 % of the weights


@cache
def say_once(text: str) -> None:
    """A notice to the user, the first time."""
    log.warning(text)


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix, checked but not read.

    `tensors`: the names it consists of. `scheme`: how its codes are kept. `read`: the codes; or where no format of ours
    holds them (`why` says what they are) the decoded matrix float32 [O, K], to be rounded to the scheme.
    """

    tensors: tuple[str, ...]
    scheme: QuantScheme
    read: Callable[[], QuantTensor | Tensor]
    why: str = ""


class Files(Protocol):
    """A checkpoint's tensors, as a layout sees them."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type, as safetensors names it, and shape of a tensor."""

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored, finite where it is a float."""

    def expect(self, name: str, dtypes: Seq[str], *shapes: tuple[int, ...]) -> str:
        """The name itself. Raises ModelLoadError unless it is there in one of the types and one of the shapes."""


class Layout:
    """A quant_method with its settings.

    `unread`, `cache`: endings of tensors that are left out: scales of activations, of the KV cache (ours are per row).
    """

    unread: tuple[str, ...] = ()
    cache: tuple[str, ...] = ()
    where = ""

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        """How matrix `name` (without ".weight") of that shape is stored; None: dense. Raises ModelLoadError."""
        raise NotImplementedError

    def spare(self, name: str, files: Files) -> bool:
        """Whether a tensor that no matrix consists of may be left unread."""
        if self.unread and name.endswith(self.unread):
            float_rows(self.where)
        if self.cache and name.endswith(self.cache):
            say_once(
                f"{self.where}: its static scales for the KV cache are left out; scales of this cache are per token "
                "and head (--kv-format)"
            )
        return name.endswith((*self.unread, *self.cache))


def float_rows(where: str) -> None:
    """Say once that a checkpoint's settings for activations are left out."""
    say_once(
        f"{where}: its settings for activations are left out, and rows stay float32; of such settings only dynamic "
        "8-bit ones by token are kept"
    )


def round_scheme(width: int) -> QuantScheme:
    """What matrices that no kernel has are rounded to."""
    name, group = ROUNDED
    return QuantScheme(name, group if width % group == 0 else None)


def rounded(scheme: QuantScheme, height: int, rows: Callable[[int, int], Tensor]) -> QuantTensor:
    """A matrix of `height` rows in a scheme, some rows at a time; `rows(start, stop)` gives them."""
    pieces = [scheme.encode(rows(i, min(i + ROWS, height))) for i in range(0, height, ROWS)]
    return get(scheme.weights).concat(pieces)


def group_size(config: Mapping[str, Any], default: int, where: str) -> int | None:
    """The values that share a scale, None: a row. Raises ModelLoadError."""
    group = whole_number(config, where, "group_size", default, -1)
    if group == 0:
        raise ModelLoadError(f"{where}: group_size 0 is none")
    return None if group == -1 else group


def two_sizes(value: object, where: str) -> tuple[int, int]:
    """Rows and columns of a block. Raises ModelLoadError."""
    if not isinstance(value, list) or len(value) != 2 or any(type(v) is not int or not 0 < v < 2**20 for v in value):
        raise ModelLoadError(f"{where} must be two sizes, got {str(value)[:80]}")
    return value[0], value[1]


def keep(
    name: str, width: int, group: int | None, symmetric: bool = True, activations: str | None = None
) -> tuple[QuantScheme, int] | None:
    """The scheme that keeps codes of format `name` in groups of `group` (None: rows), and how often a scale repeats.

    Kernels have groups of 32, 64 and 128 and rows: a larger group keeps its codes, and its scale is repeated. None
    where neither fits.
    """
    group = None if group == width and group not in GROUPS else group
    if group is not None and (width % group or (group not in GROUPS and group % GROUPS[-1])):
        return None
    kept = None if group is None else min(group, GROUPS[-1])
    own = CHANNEL if group is None and get(name).groups else kept  # where the format would choose a group
    try:
        return QuantScheme(name, own, symmetric, activations), (group or width) // (kept or width)
    except ConfigError:
        return None


Parts = Callable[[], tuple[Tensor, Tensor, "Tensor | float"]]


def stored(
    tensors: Seq[str],
    kept: tuple[QuantScheme, int] | None,
    parts: Parts,
    width: int,
    group: int | None,
    why: str,
    index: Tensor | None = None,
) -> StoredMatrix:
    """A matrix [O, K] of integer codes: in the scheme that `keep` found, or decoded where it found none.

    `parts()` reads codes [O, K], scales [O, n] and zero points [O, n], or the number that they all are: then the format
    knows it. `index` [K]: each column's group where they do not lie in order (act-order); full groups are kept, their
    columns sorted. `why`: what no format holds, before its groups.
    """
    in_order = torch.arange(width) // (group or width)
    groups = in_order if index is None else index.long()
    order = None if index is None else groups.argsort(stable=True)
    looked_up = tensors[0].startswith("model.embed_tokens.")  # by kernels that know no order
    if order is not None and (looked_up or not groups[order].equal(in_order)):
        kept, why = None, f"{why} with act-order"
    if kept is None:
        what = f"{why} in rows" if group in (None, width) else f"{why} in groups of {group}"
        return StoredMatrix(tuple(tensors), round_scheme(width), lambda: by_group(*parts(), groups), what)
    scheme, times = kept

    def read() -> QuantTensor:
        codes, scales, zeros = parts()
        codes = codes if order is None else codes.index_select(1, order)
        found = {"codes": codes, "scales": spread(scales, times).contiguous()}
        if scheme.weights == "int8" and found["scales"].shape[1] == 1:
            found["scales"] = found["scales"].float()
        if isinstance(zeros, Tensor):
            found["zeros"] = spread(zeros, times).contiguous()
        return QuantTensor(scheme.weights, (codes.shape[0], width), found, scheme.activations, order=order)

    return StoredMatrix(tuple(tensors), scheme, read)


def spread(x: Tensor, times: int) -> Tensor:
    """x [O, n] with each column repeated: [O, n * times]."""
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def nibbles(packed: Tensor) -> Tensor:
    """int32 or uint8 [N, W] as 4-bit codes uint8 [N, 8 W] (2 W), the lowest bits first."""
    data = packed.contiguous().view(torch.uint8)
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(1)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """int32 [N, W] as codes uint8 [N, 32 / bits * W], the lowest bits first; bits 4 or 8."""
    return nibbles(packed) if bits == 4 else packed.contiguous().view(torch.uint8)


def by_group(codes: Tensor, scales: Tensor, zeros: Tensor | float, index: Tensor) -> Tensor:
    """(codes [O, K] - zeros [O, n]) * scales [O, n] float32 [O, K], column k with group index[k]."""
    index = index.long()
    offset = zeros.float().index_select(1, index) if isinstance(zeros, Tensor) else zeros
    return (codes.float() - offset).mul_(scales.float().index_select(1, index))


def column_groups(name: str, files: Files, size: int, count: int) -> Tensor | None:
    """Each column's group by tensor `name`, None where they lie in order. Raises ModelLoadError for one beyond."""
    index = files.raw(name)
    if index.equal(torch.arange(len(index), dtype=index.dtype) // size):
        return None
    if index.min() < 0 or index.max() >= count:
        raise ModelLoadError(f"tensor {name} names groups outside 0..{count - 1}; the file is damaged")
    return index


def listed(value: object, where: str) -> list[str]:
    """A list of names, or nothing. Raises ModelLoadError."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ModelLoadError(f"{where} must be a list of names, got {str(value)[:80]}")
    return value


def finite(value: QuantTensor | Tensor) -> bool:
    """Whether a matrix [O, K], or what its codes mean by their scales, is finite everywhere in float32."""
    if isinstance(value, Tensor):
        # The sum is the fast check; it may also overflow.
        return bool(value.sum().isfinite()) or bool(value.isfinite().all())
    end = ENDS.get(value.format)
    for part in get(value.format).scale_parts:
        scales = value.parts.get(part)
        if scales is None or not scales.is_floating_point():
            continue
        bound = scales.abs().amax().double() * LARGEST.get(value.format, 256.0)  # NaN, where any scale is
        if not bound <= torch.finfo(torch.float32).max:
            return False
    if end is None:
        return True
    return all(bool(((rows & 0x7F) < end).all()) for rows in torch.split(value.parts["codes"], ROWS))
