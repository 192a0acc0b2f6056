"""GPTQ checkpoints (Frantar et al., 2023) as AutoGPTQ and GPTQModel write them: codes along K, zero points, g_idx.

AWQ checkpoints (Lin et al., 2023) in AutoAWQ's "gemm" layout: 4 bits along O, interleaved, with zero points.

Marlin (Frantar et al., 2024) and QQQ (Zhang et al., 2024): 4 bits in the tiles of Marlin's GPU kernels. Both store `B`
int32 [K / 16, 2 O]: eight codes per word, the first in the lowest bits, and 1024 codes per 16 x 64 tile of the weight
[K, O]. Codes are in the order in which the 32 threads of a warp multiply them; scales are in the order in which the
threads hold outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor

from sameseed.errors import ModelLoadError, say_once
from sameseed.models.config import one_of, whole_number
from sameseed.models.layouts.base import (
    FLOATS,
    REMEDY,
    Files,
    Layout,
    StoredMatrix,
    column_groups,
    group_size,
    nibbles,
    stored,
    unpacked,
)
from sameseed.models.layouts.patterns import fits, spellings

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # places of codes 0..7 in an int32: of outputs in AWQ, of a thread in Marlin
DEPTH, HEIGHT = 16, 64  # size of a tile along K and along O
HALVES = [1, 3, 5, 7, 0, 2, 4, 6]  # the same for kernels that read codes in the upper halves of bytes
ZERO = 8
# AutoRound's packing_format -> the layout that has the same tensors.
PACKINGS = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq"), "gptq"),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), "gptq_v2"),
    **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq"), "awq"),
}


@dataclass(frozen=True)
class GptqSettings:
    """Settings of one matrix. `plus`: added to stored zero points, which the layout's first version stores minus 1."""

    bits: int
    group: int | None
    symmetric: bool
    plus: int


def _settings(config: object, default: GptqSettings, where: str) -> GptqSettings:
    if not isinstance(config, dict):
        raise ModelLoadError(f"{where} must be an object, got {str(config)[:80]}")
    bits = whole_number(config, where, "bits", default.bits or 4)
    one_of(bits, (4, 8), f"{where}: bits of GPTQ", REMEDY)
    group = group_size(config, default.group or -1, where)
    return replace(default, bits=bits, group=group, symmetric=bool(config.get("sym", default.symmetric)))


class GptqLayout(Layout):
    """Settings for all matrices; `overrides` from `dynamic`: expressions with changed settings, or None for dense.

    `by_name`: changed settings of single modules, which come first.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        version = config.get("checkpoint_format") or "gptq"
        one_of(version, ("gptq", "gptq_v2"), f"{where}: checkpoint_format", REMEDY)
        self.where = where
        self.settings = _settings(config, GptqSettings(0, None, True, 1 if version == "gptq" else 0), where)
        self.overrides: list[tuple[str, GptqSettings | None]] = []
        dynamic = config.get("dynamic") or {}
        if not isinstance(dynamic, dict):
            raise ModelLoadError(f"{where}: dynamic must be an object, got {str(dynamic)[:80]}")
        for pattern, changes in dynamic.items():
            text = pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
            fits(f"re:{text}", "")
            left_out = pattern.startswith("-:")
            changed = None if left_out else _settings(changes, self.settings, f"{where}: dynamic {pattern}")
            self.overrides.append((text, changed))
        self.by_name: dict[str, GptqSettings] = {}

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        if f"{name}.qweight" not in files:
            return None  # dense; or missing, which the check of dense tensors reports
        own = (self.by_name[n] for n in spellings(name) if n in self.by_name)
        changes = (changed for pattern, changed in self.overrides if fits(f"re:{pattern}", name))
        s = next(chain(own, changes), self.settings)
        if s is None:
            raise ModelLoadError(f"{self.where}: {name} is not to be quantized, but tensor {name}.qweight is there")
        (height, width), per = shape, 32 // s.bits
        size = s.group or width
        count = -(-width // size)
        if width % per or height % per:
            raise ModelLoadError(f"tensor {name} {list(shape)} cannot be GPTQ: its sizes are no multiples of {per}")
        tensors = [
            files.expect(f"{name}.qweight", ["I32"], (width // per, height)),
            files.expect(f"{name}.qzeros", ["I32"], (count, height // per)),
            files.expect(f"{name}.scales", FLOATS, (count, height)),
        ]
        index = None
        if f"{name}.g_idx" in files:
            tensors.append(files.expect(f"{name}.g_idx", ["I32", "I64"], (width,)))
            index = column_groups(tensors[-1], files, size, count)

        def parts() -> tuple[Tensor, Tensor, Tensor | None]:
            codes, scales = unpacked(files.raw(f"{name}.qweight").T, s.bits), files.raw(f"{name}.scales").T.contiguous()
            zeros = self._zeros(name, files.raw(f"{name}.qzeros"), s)
            return codes, scales, None if s.symmetric else zeros

        why = f"{s.bits}-bit GPTQ{'' if s.symmetric else ' with zero points'}"
        return stored(tensors, s.bits, parts, width, s.group, why, s.symmetric, index=index)

    def _zeros(self, name: str, packed: Tensor, s: GptqSettings) -> Tensor:
        """Zero points uint8 [O, n] from qzeros int32 [n, O bits / 32]. Raises ModelLoadError if `sym` contradicts."""
        middle = 1 << (s.bits - 1)
        zeros = unpacked(packed, s.bits).T
        if s.plus and not (s.symmetric and (zeros == middle).all()):
            # Writers subtract 1 from each code in whole words, where a zero point of 0 borrows from the next one. So
            # the ones are added to whole words here.
            zeros = unpacked(packed + (0x11111111 if s.bits == 4 else 0x01010101), s.bits).T
        elif s.plus:
            say_once(
                f"{self.where}: its format is gptq, but symmetric zero points are {middle}, not {middle - 1}, as in "
                'gptq_v2; they are read as such ("checkpoint_format": "gptq_v2" there says so)'
            )
        if s.symmetric and not (zeros == middle).all():
            raise ModelLoadError(
                f'{self.where} calls {name} symmetric, but its zero points are not all {middle}; set "sym": false '
                'there, or "checkpoint_format": "gptq_v2" if it was written so'
            )
        return zeros

    def spare(self, name: str, files: Files) -> bool:
        return _is_idle_bias(name, files)


def _is_idle_bias(name: str, files: Files) -> bool:
    """Whether a tensor is an all-zero bias, which older writers add to every layer."""
    kind, shape = files.kind(name)
    return name.endswith(".bias") and kind in FLOATS and len(shape) == 1 and not files.raw(name).any()


class AwqLayout(Layout):
    """4-bit codes with zero points, in AWQ's layout "gemm"."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        version = str(config.get("version", "gemm")).lower()
        one_of(version, ["gemm"], f"{where}: AWQ's version", REMEDY)
        bits = whole_number(config, where, "bits", whole_number(config, where, "w_bit", 4))
        one_of(bits, [4], f"{where}: bits of AWQ", REMEDY)
        one_of(config.get("zero_point") is not False, [True], f"{where}: zero_point", REMEDY)
        self.group = group_size(config, whole_number(config, where, "q_group_size", 128, -1), where)

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        if f"{name}.qweight" not in files:
            return None
        height, width = shape
        size = self.group or width
        if height % 8 or width % size:
            raise ModelLoadError(f"tensor {name} {list(shape)} is no AWQ: 8 must divide its height, {size} its width")
        tensors = (
            files.expect(f"{name}.qweight", ["I32"], (width, height // 8)),
            files.expect(f"{name}.qzeros", ["I32"], (width // size, height // 8)),
            files.expect(f"{name}.scales", FLOATS, (width // size, height)),
        )

        def parts() -> tuple[Tensor, Tensor, Tensor]:
            codes, zeros = _ordered(files.raw(f"{name}.qweight")), _ordered(files.raw(f"{name}.qzeros"))
            return codes, files.raw(f"{name}.scales").T.contiguous(), zeros

        return stored(tensors, 4, parts, width, self.group, "AWQ", symmetric=False)


def auto_round(config: Mapping[str, Any], where: str) -> Layout:
    """The layout of a checkpoint of AutoRound (Cheng et al., 2023): AWQ's, or GPTQ's with settings in `extra_config`.

    A key of `extra_config` is the name of a module or an expression, which may match a part of the name.
    """
    packing = config.get("packing_format", "auto_round:auto_gptq")
    version = PACKINGS[one_of(packing, PACKINGS, f"{where}: AutoRound's packing_format", REMEDY)]
    one_of(config.get("data_type", "int"), ["int"], f"{where}: data_type", REMEDY)
    if version == "awq":
        return AwqLayout(config, where)
    extra = config.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(changes, dict) for changes in extra.values()):
        raise ModelLoadError(f"{where}: extra_config must hold objects by name, got {str(extra)[:80]}")
    extra = {name: changes for name, changes in extra.items() if changes.get("bits") not in (16, 32)}  # those are dense
    single = {name: changes for name, changes in extra.items() if re.fullmatch(r"[\w.]+", name)}
    dynamic = {f".*(?:{text})": changes for text, changes in extra.items() if text not in single}
    # Where all zero points are in the middle, both versions are read alike, whatever the file calls itself.
    version = "gptq" if config.get("sym", True) else version
    layout = GptqLayout({**config, "checkpoint_format": version, "dynamic": dynamic}, where)
    for name, changes in single.items():
        layout.by_name[name] = _settings(changes, layout.settings, f"{where}: extra_config {name[:80]}")
    return layout


def _ordered(packed: Tensor) -> Tensor:
    """Unpack int32 [N, O / 8] to codes uint8 [O, N]."""
    codes = nibbles(packed).view(packed.shape[0], -1, 8)[..., ORDER]
    return codes.flatten(1).T.contiguous()


class MarlinLayout(Layout):
    """value = (code - 8) * scale, with scales `s` per row or group.

    For `quant_method` marlin, or gptq with `checkpoint_format` marlin.
    """

    name = "Marlin"
    activations: str | None = None  # format that activation rows are rounded to

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        bits = whole_number(config, where, "bits", whole_number(config, where, "wbits", 4))
        one_of(bits, [4], f"{where}: bits of {self.name}", REMEDY)
        for flag, right in (("desc_act", False), ("sym", True)):
            one_of(config.get(flag), (None, right), f"{where}: {flag} of {self.name}", REMEDY)
        self.group = group_size(config, -1, where)

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        if f"{name}.B" not in files:
            return None
        height, width = shape
        if height % HEIGHT or width % DEPTH or width % (self.group or width):
            size = f"{HEIGHT} must divide its height, {DEPTH} and groups of {self.group or width} its width"
            raise ModelLoadError(f"tensor {name} {list(shape)} cannot be {self.name}: {size}")
        group = None if self.group == width else self.group
        files.expect(f"{name}.B", ["I32"], (width // DEPTH, 2 * height))
        scales, read = self._scales(name, height, 1 if group is None else width // group, files)

        def parts() -> tuple[Tensor, Tensor, None]:
            return self._codes(files.raw(f"{name}.B"), group), read().T.contiguous(), None

        return stored([f"{name}.B", *scales], 4, parts, width, group, self.name, activations=self.activations)

    def _scales(self, name: str, height: int, count: int, files: Files) -> tuple[list[str], Callable[[], Tensor]]:
        """The names of the tensors that hold scales, checked, and a function that reads scales [n, O]."""
        tensor = files.expect(f"{name}.s", FLOATS, (count, height))
        return [tensor], lambda: (_single if count == 1 else _grouped)(files.raw(tensor))

    def _codes(self, packed: Tensor, group: int | None) -> Tensor:
        """Codes uint8 [O, K]: thread 4 a + t holds rows 2 t, 2 t + 1 and the rows 8 below, in columns a and 8 + a."""
        tiles = _words(packed, ORDER, 2, 2, 2)  # [.., .., a, t, 16 columns, 8 columns, 8 rows, row]
        return tiles.permute(1, 4, 5, 2, 0, 6, 3, 7).reshape(packed.shape[1] // 2, -1)

    def spare(self, name: str, files: Files) -> bool:
        """Space for the kernel's locks and all-zero biases may be ignored."""
        empty = name.endswith(".s_group") and files.kind(name)[1] == (0,)
        return empty or name.endswith(".workspace") or _is_idle_bias(name, files)


class QqqLayout(MarlinLayout):
    """Scales per output (`s_channel` float32), times `s_group` if in groups; activation rows are rounded to int8.

    QQQ's own kernel rounds the product of code and group scale to int8; here the product stays exact.
    """

    name = "QQQ"
    activations = "int8"

    def _scales(self, name: str, height: int, count: int, files: Files) -> tuple[list[str], Callable[[], Tensor]]:
        channel = files.expect(f"{name}.s_channel", ["F32"], (1, height))
        if count == 1:
            return [channel], lambda: 16.0 * _single(files.raw(channel))  # stored for codes in the upper half of a byte
        groups = files.expect(f"{name}.s_group", FLOATS, (count, height))
        return [channel, groups], lambda: _grouped(files.raw(groups)).float() * _single(files.raw(channel))

    def _codes(self, packed: Tensor, group: int | None) -> Tensor:
        """Codes uint8 [O, K]: thread 4 a + t holds rows 4 t to 4 t + 3, columns a and 8 + a; signed without groups."""
        tiles = _words(packed, HALVES if group is None else ORDER, 2, 4)  # [.., .., a, t, 16 columns, 8 columns, row]
        codes = tiles.permute(1, 4, 5, 2, 0, 3, 6).reshape(packed.shape[1] // 2, -1)
        return codes ^ ZERO if group is None else codes


def _words(packed: Tensor, places: list[int], *sizes: int) -> Tensor:
    """Unpack int32 [K / 16, 2 O] to uint8 [K / 16, O / 64, 8, 4, 4, *sizes]: thread (a, t), 16 columns, eight codes."""
    words = nibbles(packed).view(packed.shape[0], -1, 8, 4, 4, 8)[..., places]
    return words.view(*words.shape[:-1], *sizes)


def _grouped(scales: Tensor) -> Tensor:
    """Group scales [n, O] in the order of outputs: the stored order transposes each 8 x 8 block of outputs."""
    return scales.view(len(scales), -1, 8, 8).transpose(-1, -2).flatten(1)


def _single(scales: Tensor) -> Tensor:
    """Scales [1, O] in the order of outputs: of 32 stored scales, each of four threads holds pairs 8 outputs apart."""
    return scales.view(len(scales), -1, 4, 4, 2).transpose(-2, -3).flatten(1)
