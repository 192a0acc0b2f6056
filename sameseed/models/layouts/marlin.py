"""4-bit checkpoints packed for GPU kernels: Marlin (Frantar et al., 2024) and QQQ (Zhang et al., 2024), in its tiles.

Both keep `B` int32 [K / 16, 2 O]: eight codes a word, the first in its lowest bits, 1024 codes for each 16 x 64 part of
the weight [K, O]. They lie in the order in which the 32 threads of a warp multiply them; scales lie in that of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.models.config import whole_number
from sameseed.models.layouts.base import FLOATS, Files, Layout, StoredMatrix, group_size, keep, nibbles, stored

DEPTH, HEIGHT = 16, 64  # of a part, along K and O
PAIRED = [0, 4, 1, 5, 2, 6, 3, 7]  # where a thread's codes 0..7 lie in their word
HALVES = [1, 3, 5, 7, 0, 2, 4, 6]  # the same for kernels that shift upper halves of bytes
ZERO = 8
REMEDY = "store it as gptq, or use the unquantized model and --format"


class MarlinLayout(Layout):
    """Codes less 8, scales `s` of rows or groups. `quant_method` marlin, or gptq in the `checkpoint_format` marlin."""

    name = "Marlin"
    activations: str | None = None  # to what rows are rounded

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        bits = whole_number(config, where, "bits", whole_number(config, where, "wbits", 4))
        if bits != 4:
            raise ModelLoadError(f"{where}: {self.name} with {bits} bits cannot be read, 4 can; {REMEDY}")
        for flag, wrong in (("desc_act", True), ("sym", False)):
            if config.get(flag, not wrong) is wrong:
                raise ModelLoadError(f'{where}: {self.name} has no "{flag}": {str(wrong).lower()}; {REMEDY}')
        self.group = group_size(config, -1, where)

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        if f"{name}.B" not in files:
            return None
        height, width = shape
        if height % HEIGHT or width % DEPTH or width % (self.group or width):
            size = "" if self.group is None else f", and groups of {self.group} its width"
            raise ModelLoadError(
                f"tensor {name} {list(shape)} cannot be {self.name}: {HEIGHT} must divide its height and {DEPTH} its "
                f"width{size}"
            )
        group = None if self.group == width else self.group
        files.expect(f"{name}.B", ["I32"], (width // DEPTH, 2 * height))
        scales, read = self._scales(name, height, 1 if group is None else width // group, files)

        def parts() -> tuple[Tensor, Tensor, float]:
            return self._codes(files.raw(f"{name}.B"), group), read().T.contiguous(), float(ZERO)

        kept = keep("int4", width, group, activations=self.activations)
        return stored([f"{name}.B", *scales], kept, parts, width, group, self.name)

    def _scales(self, name: str, height: int, count: int, files: Files) -> tuple[list[str], Callable[[], Tensor]]:
        """The tensors that hold scales, checked, and what reads them: [n, O]."""
        tensor = files.expect(f"{name}.s", FLOATS, (count, height))
        return [tensor], lambda: (_single if count == 1 else _grouped)(files.raw(tensor))

    def _codes(self, packed: Tensor, group: int | None) -> Tensor:
        """Codes uint8 [O, K]: thread 4 a + t has rows 2 t, 2 t + 1 and those 8 below, in columns a and 8 + a."""
        tiles = _words(packed, PAIRED, 2, 2, 2)  # [.., .., a, t, 16 columns, 8 columns, 8 rows, row]
        return tiles.permute(1, 4, 5, 2, 0, 6, 3, 7).reshape(packed.shape[1] // 2, -1)

    def spare(self, name: str, files: Files) -> bool:
        """Room for the kernel's locks, and biases of zeros."""
        kind, shape = files.kind(name)
        if name.endswith(".workspace") or (name.endswith(".s_group") and shape == (0,)):
            return True
        return name.endswith(".bias") and kind in FLOATS and len(shape) == 1 and not files.raw(name).any()


class QqqLayout(MarlinLayout):
    """Scales by output (`s_channel` float32), and in groups times `s_group`; rows are rounded to int8 by token.

    The kernel rounds a code times its group's scale to int8 on the way; here it stays as it is.
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
        """Codes uint8 [O, K]: thread 4 a + t has rows 4 t to 4 t + 3 in columns a and 8 + a; signed ones by output."""
        tiles = _words(packed, HALVES if group is None else PAIRED, 2, 4)  # [.., .., a, t, 16 columns, 8 columns, row]
        codes = tiles.permute(1, 4, 5, 2, 0, 3, 6).reshape(packed.shape[1] // 2, -1)
        return codes ^ ZERO if group is None else codes


def _words(packed: Tensor, places: list[int], *sizes: int) -> Tensor:
    """int32 [K / 16, 2 O] as codes uint8 [K / 16, O / 64, 8, 4, 4, *sizes]: thread (a, t), 16 columns, eight codes."""
    words = nibbles(packed).view(packed.shape[0], -1, 8, 4, 4, 8)[..., places]
    return words.view(*words.shape[:-1], *sizes)


def _grouped(scales: Tensor) -> Tensor:
    """Scales [n, O] of groups in the order of outputs: eight by eight, the rows were columns."""
    return scales.view(len(scales), -1, 8, 8).transpose(-1, -2).flatten(1)


def _single(scales: Tensor) -> Tensor:
    """Scales [1, O] of outputs in their order: of 32, four threads have pairs eight apart."""
    return scales.view(len(scales), -1, 4, 4, 2).transpose(-2, -3).flatten(1)


def is_marlin(config: Mapping[str, Any]) -> bool:
    """Does a GPTQ checkpoint's config say that it was packed for Marlin?"""
    return config.get("checkpoint_format") == "marlin" or bool(config.get("is_marlin_format"))
