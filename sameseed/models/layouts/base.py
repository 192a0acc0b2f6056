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
from sameseed.scheme import GROUPS, QuantScheme, QuantTensor, get

log = logging.getLogger("sameseed.models")
FLOATS = ("F32", "BF16", "F16")


@cache
def say_once(text: str) -> None:
    """A notice to the user, the first time."""
    log.warning(text)


def cache_scales_left_out(where: str) -> None:
    """Say that a checkpoint's static scales for the KV cache are not used."""
    say_once(
        f"{where}: its static scales for the KV cache are left out; scales of this cache are per token and head "
        "(--kv-format)"
    )


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix, checked but not read.

    `tensors`: the names it consists of. `scheme`: how its codes are kept; None: no format of ours holds them (`why`
    says what they are), and they are decoded. `read`: the codes, or the decoded matrix float32 [O, K].
    """

    tensors: tuple[str, ...]
    scheme: QuantScheme | None
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
    """A quant_method with its settings."""

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        """How matrix `name` (without ".weight") of that shape is stored; None: dense. Raises ModelLoadError."""
        raise NotImplementedError

    def spare(self, name: str, files: Files) -> bool:
        """Whether a tensor that no matrix consists of may be left unread."""
        return False


def whole(config: Mapping[str, Any], name: str, default: int, where: str) -> int:
    """A whole number of a quantization_config. Raises ModelLoadError."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not -1 <= value < 2**31:
        raise ModelLoadError(f"{where}: {name} must be a whole number, got {str(value)[:80]}")
    return value


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
    group = None if group == width else group
    if group is not None and (width % group or (group not in GROUPS and group % GROUPS[-1])):
        return None
    kept = None if group is None else min(group, GROUPS[-1])
    try:
        scheme = QuantScheme(name, kept, symmetric, activations)
        kept = scheme.args(width).group  # a format may have no rows where a group divides them
    except ConfigError:
        return None
    if kept is not None and group is None:
        grouped = kept in GROUPS and "group" in get(name).options
        scheme = QuantScheme(name, kept if grouped else None, symmetric, activations)
    return scheme, (group or width) // (kept or width)


Parts = Callable[[], tuple[Tensor, Tensor, "Tensor | float"]]


def stored(
    tensors: Seq[str], kept: tuple[QuantScheme, int] | None, parts: Parts, order: Tensor, why: str
) -> StoredMatrix:
    """A matrix of integer codes: in the scheme that `keep` found, or decoded where it found none.

    `parts()` reads codes [O, K], scales [O, n] and zero points [O, n], or the number that they all are: then the format
    knows it. `order` [K]: each column's group. `why`: what no format holds.
    """
    if kept is None:
        return StoredMatrix(tuple(tensors), None, lambda: by_group(*parts(), order), why)
    scheme, times = kept

    def read() -> QuantTensor:
        codes, scales, zeros = parts()
        found = {"codes": codes, "scales": spread(scales, times).contiguous()}
        if scheme.weights == "int8" and found["scales"].shape[1] == 1:
            found["scales"] = found["scales"].float()
        if isinstance(zeros, Tensor):
            found["zeros"] = spread(zeros, times).contiguous()
        return QuantTensor(scheme.weights, (codes.shape[0], codes.shape[1]), found, scheme.activations)

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


def listed(value: object, where: str) -> list[str]:
    """A list of names, or nothing. Raises ModelLoadError."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ModelLoadError(f"{where} must be a list of names, got {str(value)[:80]}")
    return value
