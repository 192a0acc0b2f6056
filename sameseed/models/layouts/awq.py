"""AWQ checkpoints (Lin et al., 2023) in AutoAWQ's "gemm" layout: 4 bits along O, interleaved, with zero points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.models.config import whole_number
from sameseed.models.layouts.base import FLOATS, Files, Layout, StoredMatrix, group_size, keep, nibbles, stored

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # positions of outputs 0..7 among the eight codes of an int32


class AwqLayout(Layout):
    """4-bit codes with zero points, in AWQ's layout "gemm"."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise ModelLoadError(f"{where}: AWQ in the layout {version[:80]!r} cannot be read; the layout gemm can")
        bits = whole_number(config, where, "bits", whole_number(config, where, "w_bit", 4))
        if bits != 4:
            raise ModelLoadError(f"{where}: AWQ with {bits} bits cannot be read; 4 can")
        if config.get("zero_point", True) is False:
            raise ModelLoadError(f"{where}: AWQ without zero points cannot be read; store it with zero_point true")
        self.group = group_size(config, whole_number(config, where, "q_group_size", 128, -1), where)

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        if f"{name}.qweight" not in files:
            return None
        height, width = shape
        size = self.group or width
        if height % 8 or width % size:
            raise ModelLoadError(
                f"tensor {name} {list(shape)} cannot be AWQ: 8 must divide its height and {size} its width"
            )
        tensors = (
            files.expect(f"{name}.qweight", ["I32"], (width, height // 8)),
            files.expect(f"{name}.qzeros", ["I32"], (width // size, height // 8)),
            files.expect(f"{name}.scales", FLOATS, (width // size, height)),
        )

        def parts() -> tuple[Tensor, Tensor, Tensor]:
            codes, zeros = _ordered(files.raw(f"{name}.qweight")), _ordered(files.raw(f"{name}.qzeros"))
            return codes, files.raw(f"{name}.scales").T.contiguous(), zeros

        kept = keep("int4", width, self.group, symmetric=False)
        return stored(tensors, kept, parts, width, self.group, "AWQ")


def _ordered(packed: Tensor) -> Tensor:
    """Unpack int32 [N, O / 8] to codes uint8 [O, N]."""
    codes = nibbles(packed).view(packed.shape[0], -1, 8)[..., ORDER]
    return codes.flatten(1).T.contiguous()
