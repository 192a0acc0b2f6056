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
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sameseed.models._file import TensorFile

MAX_HEADER = 1 << 24  # bytes; 100 000 tensors need less, and parsed JSON takes up to thirty times its length
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # types of weights
# The types that tensors of quantized matrices are read as; 8-bit floats are read as their bits.
RAW = {
    **DTYPES, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.uint8, "F8_E5M2": torch.uint8, "F8_E8M0": torch.uint8,
}  # fmt: skip
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
        length = struct.unpack("<Q", os.pread(self.descriptor, 8, 0))[0]
        if length > MAX_HEADER:
            raise self.unsound(f"a header of {length} bytes")
        try:
            with safe_open(self.path, "numpy"):  # checks the header: each byte belongs to one tensor
                pass
        except SafetensorError as error:
            raise self.unsound(str(error)) from None
        data = 8 + length
        raw = json.loads(bytes(self.read(8, data).numpy()), object_pairs_hook=_no_duplicates)
        raw.pop("__metadata__", None)
        self.entries: dict[str, Entry] = {}
        for name, value in raw.items():
            begin, end = value["data_offsets"]
            self.entries[name] = Entry(value["dtype"], tuple(value["shape"]), data + begin, data + end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
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
