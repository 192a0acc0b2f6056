"""Writes safetensors files, one or several, and a model's folder around one."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sameseed.models.checkpoint import RAW

_NAMES = {v: k for k, v in RAW.items() if not k.startswith("F8")} | {torch.bool: "BOOL"}
_NAMES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"}


def name_files(folder: Path, files: Sequence[tuple[Path, Sequence[str]]], total: int) -> None:
    """Give parts (path, names of tensors; `total` bytes) their final names, and write the index of several."""
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
    """One safetensors file, on the disk when this returns. Wide types come first, so that all lie aligned."""
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    head = safetensors_head((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in order)
    data = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data for _, t in order)
    write_file(path, chain([head], data))


def safetensors_head(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """What a safetensors file begins with; the bytes of its tensors follow in this order, wide types first."""
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
    """A file of pieces, one after the other, on the disk when this returns."""
    with path.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_model(folder: Path, weights: Mapping[str, Tensor], tables: Mapping[str, Any]) -> None:
    """A model's folder: the weights, and JSON files by name; a reader never sees half of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.partial", weights)
    os.replace(folder / "model.partial", folder / "model.safetensors")
    for name, table in tables.items():
        (folder / name).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
