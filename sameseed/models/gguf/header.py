"""The header of a GGUF file (version 2 or 3, little endian), parsed with bounds checks because files are untrusted.

Layout (ggml's docs/gguf.md): magic, version, number of tensors, number of key-values; the key-values; for each tensor
name, dimensions (the fastest first), type, offset; padding; the data. Every count and length is checked against the
rest of the file, so that a malicious file cannot cost more memory than its own size allows.
"""

from __future__ import annotations

import math
import os
import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from sameseed.errors import ModelLoadError
from sameseed.models._file import TensorFile

MAGIC = b"GGUF"
MAX_HEADER = 1 << 28  # bytes
MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 16
MAX_ITEMS = 1 << 22  # strings in all arrays together: a string takes more memory than bytes in the file
MAX_TEXT = 1 << 22  # bytes of one string
WINDOW = 1 << 20  # bytes of the header read at a time
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# Name, values and bytes of a block of the common types; the gguf package knows all, but importing it takes 0.15 s.
COMMON = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
}  # fmt: skip
_LENGTH = struct.Struct("<Q").unpack_from
SETTLED = 2.0  # seconds after which a changed file has another time, on every file system
Header = tuple[dict[str, Any], dict[str, "TensorInfo"]]
_headers: dict[tuple[int, ...], Header] = {}  # the latest ones, by file: a start reads the same header six times


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the file: ggml type, block size (values, bytes), shape with rows first, position of its bytes."""

    type: str
    block: tuple[int, int]
    shape: tuple[int, ...]
    begin: int
    end: int


class GGUFFile(TensorFile):
    """One open file with its checked header: `metadata` and `tensors` by name. Raises ModelLoadError if invalid."""

    kind = "GGUF"

    def read_header(self) -> None:
        state = os.fstat(self.descriptor)
        key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        if key not in _headers:
            while len(_headers) > 1:  # a target and its draft
                del _headers[next(iter(_headers))]
            header = self._parsed()
            if time.time() - state.st_mtime > SETTLED:
                _headers[key] = header
        else:
            header = _headers[key]
        self.metadata, self.tensors = header

    def number(self, name: str, default: Any = None, by_layer: bool = False) -> Any:
        """The number in a key of the architecture, or the first of an array by layer. Raises ModelLoadError.

        The numbers of an array must be equal, unless `by_layer`.
        """
        key = f"{self.metadata.get('general.architecture')}.{name}"
        value = self.metadata.get(key, default)
        if isinstance(value, np.ndarray):
            if not len(value) or ((value != value[0]).any() and not by_layer):
                raise ModelLoadError(f"{self.path}: {key} differs from layer to layer, which is not supported")
            value = value[0].item()
        if not isinstance(value, int | float):
            raise ModelLoadError(f"{self.path}: the key {key} must be a number, got {str(value)[:80]}")
        return value

    def by_layer(self, name: str) -> list[Any]:
        """The array in a key of the architecture, with an entry for each layer; empty where there is none."""
        value = self.metadata.get(f"{self.metadata.get('general.architecture')}.{name}")
        return value.tolist() if isinstance(value, np.ndarray) else []

    def factors(self, name: str, count: int) -> tuple[float, ...]:
        """The values of a vector of divisors of rotary frequencies. Raises ModelLoadError unless all are positive."""
        info = self.tensors.get(name)
        if info is None or info.type != "F32" or info.shape != (count,):
            what = "is missing" if info is None else f"{info.type} {list(info.shape)} does not fit the model"
            raise ModelLoadError(f"{self.path}: tensor {name} {what}; it has {count} values in F32")
        values: np.ndarray[Any, Any] = self.read(info.begin, info.end).numpy().view(np.float32)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ModelLoadError(f"{self.path}: tensor {name} holds values that are no factors")
        return tuple(values.tolist())

    def _parsed(self) -> Header:
        walk = _HeaderWalk(self)
        if walk.take(4) != MAGIC:
            raise self.unsound("it does not begin with GGUF")
        version = walk.number("<I")
        if version and version & 0xFFFF == 0:
            raise ModelLoadError(f"{self.path} is big-endian; convert it with gguf-convert-endian")
        if version not in (2, 3):
            raise self.unsound(f"of version {version}; versions 2 and 3 can be read")
        num_tensors, num_keys = walk.number("<Q"), walk.number("<Q")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise self.unsound(f"{num_tensors} tensors and {num_keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = walk.text()
            if key in metadata:
                raise self.unsound(f"it has the key {key[:80]!r} twice")
            metadata[key] = walk.value(walk.number("<I"))
        found: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name = walk.text()
            if name in found:
                raise self.unsound(f"it has the tensor {name[:80]!r} twice")
            found[name] = self._tensor(name, walk)
        return metadata, self._placed(found, walk.at, metadata.get("general.alignment", 32))

    def _tensor(self, name: str, walk: _HeaderWalk) -> TensorInfo:
        """The header entry of a tensor; its offsets are still relative to the data section."""
        dims = walk.number("<I")
        if not 1 <= dims <= 4:
            raise self.unsound(f"tensor {name[:80]!r} has {dims} dimensions")
        shape = tuple(reversed([walk.number("<Q") for _ in range(dims)]))
        kind, offset = walk.number("<I"), walk.number("<Q")
        if kind in COMMON:
            type_, *block = COMMON[kind]
        else:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

            try:
                type_, block = GGMLQuantizationType(kind).name, list(GGML_QUANT_SIZES[GGMLQuantizationType(kind)])
            except (ValueError, KeyError):
                newest = max(GGMLQuantizationType)
                raise ModelLoadError(
                    f"{self.path}: tensor {name[:80]!r} is of type {kind}, which the gguf package does not know ("
                    f"newest: {newest.name}, {newest.value}); update it (pip install -U gguf), or take another file"
                ) from None
        values = math.prod(shape)
        if shape[-1] % block[0]:
            raise self.unsound(f"tensor {name[:80]!r}: rows of {shape[-1]}, which blocks of {block[0]} do not divide")
        if not 0 < values < 2**62 or values // block[0] * block[1] > self.size - min(offset, self.size):
            raise self.unsound(f"tensor {name[:80]!r}, {type_} {list(shape)} at {offset}, does not fit the file")
        return TensorInfo(type_, (block[0], block[1]), shape, offset, offset + values // block[0] * block[1])

    def _placed(self, found: dict[str, TensorInfo], header: int, alignment: object) -> dict[str, TensorInfo]:
        """Convert offsets to the file's start; check that tensors are aligned, inside the file and do not overlap."""
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.unsound(f"an alignment of {str(alignment)[:80]}")
        data, last = -(-header // alignment) * alignment, 0
        placed = {}
        for name, t in sorted(found.items(), key=lambda item: item[1].begin):
            if t.begin % alignment or t.begin < last or data + t.end > self.size:
                raise self.unsound(
                    f"tensor {name[:80]!r}, bytes {t.begin} to {t.end}, is unaligned, overlaps another, or ends behind "
                    "the file"
                )
            last = t.end
            placed[name] = TensorInfo(t.type, t.block, t.shape, data + t.begin, data + t.end)
        return placed


class _HeaderWalk:
    """Reads a header sequentially, one window of bytes at a time."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.at = 0  # position in the file
        self.items = 0
        self._window, self._start = b"", 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises ModelLoadError where the header or the file ends earlier."""
        end = self.at + count
        if count < 0 or end > min(self.file.size, MAX_HEADER):
            raise self.file.unsound(f"its header wants {count} bytes at {self.at} of {self.file.size}")
        if end > self._start + len(self._window):
            stop = min(self.file.size, MAX_HEADER, max(end, self.at + WINDOW))
            self._window, self._start = self.file.read(self.at, stop).numpy().tobytes(), self.at
        out = self._window[self.at - self._start : end - self._start]
        self.at = end
        return out

    def number(self, kind: str) -> Any:
        """A scalar of the `struct` type `kind`."""
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        """A string; bytes that are not UTF-8 become the replacement character, as in other readers."""
        length = self.number("<Q")
        if length > MAX_TEXT:
            raise self.file.unsound(f"a text of {length} bytes at {self.at}")
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """The value of a key with GGUF type `kind`: a scalar, a string, a list of strings, or a numpy array."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.file.unsound(f"a value of the unknown type {kind} at {self.at}")
        item, length = self.number("<I"), self.number("<Q")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            if length > self.file.size:
                raise self.file.unsound(f"an array of {length} numbers at {self.at}")
            return np.frombuffer(self.take(length * dtype.itemsize), dtype)
        self.items += length
        if item != _STRING or self.items > MAX_ITEMS or length * 8 > self.file.size:
            raise self.file.unsound(f"an array of {length} values of type {item} at {self.at}")
        return self._texts(length)

    def _texts(self, count: int) -> list[str]:
        """`count` strings; a vocabulary has hundreds of thousands, so those inside the window are read in one loop."""
        found: list[str] = []
        while len(found) < count:
            found.append(self.text())  # checks bounds and moves the window
            window, at = self._window, self.at - self._start
            while len(found) < count and at + 8 <= len(window):
                end = at + 8 + _LENGTH(window, at)[0]
                if end > len(window):
                    break
                found.append(window[at + 8 : end].decode("utf-8", errors="replace"))
                at = end
            self.at = self._start + at
        return found
