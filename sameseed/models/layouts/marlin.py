"""4-bit checkpoints in the tiles of Marlin's GPU kernels: Marlin (Frantar et al., 2024) and QQQ (Zhang et al., 2024).

Both store `B` int32 [K / 16, 2 O]: eight codes per word, the first in the lowest bits, and 1024 codes per 16 x 64 tile
of the weight [K, O]. Codes are in the order in which the 32 threads of a warp multiply them; scales are in the order in
which the threads hold outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.models.config import whole_number
from sameseed.models.layouts.base import FLOATS, Files, Layout, StoredMatrix, group_size, keep, nibbles, stored

DEPTH, HEIGHT = 16, 64  # size of a tile along K and along O
PAIRED = [0, 4, 1, 5, 2, 6, 3, 7]  # positions of a thread's codes 0..7 in their word
HALVES = [1, 3, 5, 7, 0, 2, 4, 6]  # the same for kernels that read codes in the upper halves of bytes
ZERO = 8
REMEDY = "store it as gptq, or use the unquantized model and --format"


class MarlinLayout(Layout):
    """value = (code - 8) * scale, with scales `s` per row or group.

    For `quant_method` marlin, or gptq with `checkpoint_format` marlin.
    """

    name = "Marlin"
    activations: str | None = None  # format that activation rows are rounded to

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
        """The names of the tensors that hold scales, checked, and a function that reads scales [n, O]."""
        tensor = files.expect(f"{name}.s", FLOATS, (count, height))
        return [tensor], lambda: (_single if count == 1 else _grouped)(files.raw(tensor))

    def _codes(self, packed: Tensor, group: int | None) -> Tensor:
        """Codes uint8 [O, K]: thread 4 a + t holds rows 2 t, 2 t + 1 and the rows 8 below, in columns a and 8 + a."""
        tiles = _words(packed, PAIRED, 2, 2, 2)  # [.., .., a, t, 16 columns, 8 columns, 8 rows, row]
        return tiles.permute(1, 4, 5, 2, 0, 6, 3, 7).reshape(packed.shape[1] // 2, -1)

    def spare(self, name: str, files: Files) -> bool:
        """Space for the kernel's locks and all-zero biases may be ignored."""
        kind, shape = files.kind(name)
        if name.endswith(".workspace") or (name.endswith(".s_group") and shape == (0,)):
            return True
        return name.endswith(".bias") and kind in FLOATS and len(shape) == 1 and not files.raw(name).any()


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
        tiles = _words(packed, HALVES if group is None else PAIRED, 2, 4)  # [.., .., a, t, 16 columns, 8 columns, row]
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


def is_marlin(config: Mapping[str, Any]) -> bool:
    """Whether a GPTQ checkpoint's config says that the checkpoint was packed for Marlin."""
    return config.get("checkpoint_format") == "marlin" or bool(config.get("is_marlin_format"))
