"""Safetensors files: read and check one, write one or several, and write a model's folder."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from sameseed.models._file import TensorFile

MAX_HEADER = 1 << 24  # bytes; 100 000 tensors need less, and parsed JSON takes up to thirty times its length
MAX_DIMENSIONS = 8
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # types of weights
RAW = {
    **DTYPES, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.uint8, "F8_E5M2": torch.uint8, "F8_E8M0": torch.uint8,
}  # fmt: skip
# RAW: the types that tensors of quantized matrices are read as; 8-bit floats are read as their bits.
# BITS: the width of each type.
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_NAMES = {v: k for k, v in RAW.items() if not k.startswith("F8")} | {torch.bool: "BOOL"}
_NAMES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: type and shape from the header, and the position of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(TensorFile):
    """One open file and its checked header. Raises ModelLoadError for an invalid file."""

    kind = "safetensors"

    def read_header(self) -> None:
        size = self.size
        if size < 8:
            raise self.unsound(f"{size} bytes are too few")
        length = struct.unpack("<Q", os.pread(self.descriptor, 8, 0))[0]
        if length > min(MAX_HEADER, size - 8):
            raise self.unsound(f"a header of {length} bytes in a file of {size}")
        text = bytes(self.read(8, 8 + length).numpy()).decode("utf-8")
        raw = json.loads(text, object_pairs_hook=_no_duplicates)
        if not isinstance(raw, dict):
            raise self.unsound("its header is no JSON object")
        raw.pop("__metadata__", None)
        self.entries: dict[str, Entry] = {}
        for name, value in raw.items():
            fields = value if isinstance(value, dict) else {}
            dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
            bits = BITS.get(dtype) if isinstance(dtype, str) else None
            # The number of dimensions is checked before their product: with very many the product would be huge.
            if bits is None or not _naturals(shape, MAX_DIMENSIONS) or not _naturals(offsets, 2) or len(offsets) != 2:
                raise self.unsound(f"the header says of tensor {name[:80]}: {str(value)[:80]}")
            begin, end = offsets
            if begin > end or (end - begin) * 8 != math.prod(shape) * bits:
                raise self.unsound(f"tensor {name[:80]}, {dtype} {shape}, cannot take bytes {begin} to {end}")
            self.entries[name] = Entry(str(dtype), tuple(shape), 8 + length + begin, 8 + length + end)
        at = 8 + length  # each byte belongs to one tensor: no overlap, no hole, no end beyond the file's
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != at:
                raise self.unsound(f"tensor {name[:80]} begins at byte {entry.begin}, not at {at}")
            at = entry.end
        if at != size:
            raise self.unsound(f"its tensors end at byte {at}, the file at {size}")


def _naturals(value: object, most: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= most and all(type(v) is int and 0 <= v < 2**62 for v in value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header names a tensor twice")
    return found


def name_files(folder: Path, files: Sequence[tuple[Path, Sequence[str]]], total: int) -> None:
    """Rename the files (path, names of its tensors) to their final names; write an index (`total` bytes) of several."""
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, (path, names) in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_file(folder / "model.safetensors.index.json", [json.dumps(index, indent=2).encode()])


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write and sync one safetensors file. Wide types come first, so that all tensors are aligned."""
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    head = safetensors_head((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in order)
    data = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data for _, t in order)
    write_file(path, chain([head], data))


def safetensors_head(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The length and JSON header of a safetensors file; the tensors' bytes must follow in the same order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces to a file, one after the other, and sync the file to the disk."""
    with path.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries (the file names) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_model(folder: Path, weights: Mapping[str, Tensor], tables: Mapping[str, Any]) -> None:
    """Write a model's folder: the weights, and JSON files by name. The weights file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.partial", weights)
    os.replace(folder / "model.partial", folder / "model.safetensors")
    for name, table in tables.items():
        (folder / name).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
