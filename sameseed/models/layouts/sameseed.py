"""sameseed's own layout, for schemes that no other tool's layout can describe: each part of a QuantTensor is a tensor.

`quantization_config`: {"quant_method": "sameseed", "version": 1, "modules": {"model.layers.0.mlp.up_proj": "qoq"}}.
`modules` holds the text of each module's scheme. The tensors are `<module>.<part>`. Codes [O, K] of b = 1, 2 or 4 bits
are packed 8 / b to a byte, the first in the lowest bits: `<module>.codes4` [O, K / 2].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ConfigError, ModelLoadError, RegistryError
from sameseed.formats._coded import PACKED, packed_bytes, unpacked_bytes
from sameseed.models.layouts.base import FLOATS, Files, Layout, StoredMatrix
from sameseed.scheme import QuantScheme, QuantTensor, get

VERSION = 1
WIDEST = 1 << 16  # most columns of a matrix, so that a file that merely names wide matrices takes little memory
ROWS = 256  # rows of the sample from which the shapes of a module's parts are derived
TYPES = {
    torch.uint8: ("U8",), torch.int8: ("I8",), torch.int16: ("I16",), torch.int32: ("I32",), torch.int64: ("I64",),
    torch.float32: FLOATS, torch.bfloat16: FLOATS, torch.float16: FLOATS,
}  # fmt: skip


class Own(Layout):
    """The layout: a scheme per module."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        modules = config.get("modules")
        if config.get("version") != VERSION or not isinstance(modules, dict):
            raise ModelLoadError(f"{where}: this sameseed reads version {VERSION} of its own layout; update it")
        self.schemes = {}
        for name, text in modules.items():
            try:
                self.schemes[name] = QuantScheme.parse(str(text))
            except (ConfigError, RegistryError) as error:
                raise ModelLoadError(f"{where}: module {name[:80]!r}: {error}") from None

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        scheme = self.schemes.get(name)
        if scheme is None or scheme.weights == "auto":
            return None
        if shape[1] > WIDEST:
            raise ModelLoadError(f"tensor {name} {list(shape)} is too wide for any format")
        try:
            like = _parts(scheme, shape[1])
        except ConfigError as error:
            raise ModelLoadError(f"tensor {name} {list(shape)} cannot be stored as {scheme}: {error}") from None
        tensors = {}
        for part, (dtype, scaled, fixed) in like.items():
            want = (-(-scaled * shape[0] // ROWS), *fixed) if scaled else fixed
            if bits := _packed_bits(scheme.weights, part, dtype):
                tensors[part] = files.expect(f"{name}.{part}{bits}", ["U8"], (shape[0], -(-shape[1] * bits // 8)))
            else:
                tensors[part] = files.expect(f"{name}.{part}", TYPES[dtype], want)

        def read() -> QuantTensor:
            parts = {part: files.raw(at) for part, at in tensors.items()}
            for part, (dtype, _, _) in like.items():
                if bits := _packed_bits(scheme.weights, part, dtype):
                    parts[part] = unpacked_bytes(parts[part], bits)[:, : shape[1]].contiguous()
            return QuantTensor(scheme.weights, shape, parts, scheme.activations)

        return StoredMatrix(tuple(tensors.values()), scheme, read)


@cache
def _parts(scheme: QuantScheme, width: int) -> dict[str, tuple[torch.dtype, int, tuple[int, ...]]]:
    """For each part: its type, its first dimension for ROWS rows (0: independent of the rows), its other dimensions."""
    whole, half = (scheme.encode(torch.zeros(rows, width)).parts for rows in (ROWS, ROWS // 2))
    return {
        part: (t.dtype, 0 if t.shape == half[part].shape else t.shape[0], tuple(t.shape[t.shape != half[part].shape :]))
        for part, t in whole.items()
    }


def _packed_bits(name: str, part: str, dtype: torch.dtype) -> int:
    """Bits of a part that holds codes of less than a byte; 0: the part is stored unpacked."""
    bits = get(name).bits
    return bits if part == "codes" and dtype == torch.uint8 and bits in PACKED else 0


def tensors_of(name: str, q: QuantTensor) -> dict[str, Tensor]:
    """The tensors of module `name`, as `find` reads them."""
    found = {}
    for part, value in q.parts.items():
        bits = _packed_bits(q.format, part, value.dtype)
        found[f"{name}.{part}{bits or ''}"] = packed_bytes(value, bits) if bits else value
    return found


def config_of(schemes: Mapping[str, QuantScheme]) -> dict[str, Any]:
    """The `quantization_config` for these schemes by module."""
    modules = {name: str(scheme) for name, scheme in schemes.items()}
    return {"quant_method": "sameseed", "version": VERSION, "modules": modules}
