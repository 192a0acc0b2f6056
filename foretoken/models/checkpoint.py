"""Checkpoint: the tensors of a folder's safetensors files, read in rows, so that a large one is never whole in memory.

Files are read with pread, not mapped: pages of a map count as the process's own memory for as long as it lasts. The
header is checked here (https://huggingface.co/docs/safetensors: an 8-byte length, JSON, then the data).
"""

from __future__ import annotations

import json
import math
import os
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from foretoken.errors import ModelLoadError
from foretoken.formats.scheme import QuantScheme, QuantTensor
from foretoken.models.config import ModelConfig
from foretoken.models.weights import expected_shapes

# Tensors of older checkpoints that can be computed from the config.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias")
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # what weights may be
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: type and shape as its header has them, and its bytes' place in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The tensors of a folder by name. A context: its files are open inside. A `Source` of weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, SafetensorsFile] = {}  # by tensor name

    def __enter__(self) -> Checkpoint:
        try:
            for file in self._file_names():
                path = self.folder / file
                if not path.exists():
                    raise ModelLoadError(f"{path} is missing, though the index names it; download it again")
                opened = SafetensorsFile(path)
                self._stack.callback(opened.close)
                self._files.update(dict.fromkeys(opened.entries, opened))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _file_names(self) -> list[str]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                names = sorted(set(weight_map.values()))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ModelLoadError(f"{index} is no valid index ({error!r}); download it again") from None
            if any(not isinstance(n, str) or Path(n).name != n for n in names):
                raise ModelLoadError(f"{index} names files outside its folder; that is not a sound checkpoint")
            return names
        if (self.folder / "model.safetensors").exists():  # others beside it are other forms of the same weights
            return ["model.safetensors"]
        names = sorted(p.name for p in self.folder.glob("*.safetensors"))
        if not names:
            other = [p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
            hint = f"; {other[0]} is a pickle, which is never opened: convert it with safetensors" if other else ""
            raise ModelLoadError(f"{self.folder} holds no *.safetensors file{hint}")
        return names

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def scheme(self, name: str) -> QuantScheme | None:
        """None: every matrix is stored as the numbers themselves."""
        return None

    def stored(self, name: str) -> QuantTensor:
        """No matrix has a scheme."""
        raise NotImplementedError

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor that `check` has passed."""
        return DTYPES[self._files[name].entries[name].dtype]

    def tensor(self, name: str) -> Tensor:
        """One tensor, checked to be finite."""
        entry = self._files[name].entries[name]
        return self._finite(name, entry.begin, entry.end).view(entry.shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of a matrix, checked to be finite; fresh memory."""
        entry = self._files[name].entries[name]
        width = entry.shape[1] * _BITS[entry.dtype] // 8  # bytes
        begin = entry.begin + start * width
        return self._finite(name, begin, begin + (stop - start) * width).view(stop - start, entry.shape[1])

    def _finite(self, name: str, begin: int, end: int) -> Tensor:
        file = self._files[name]
        value = file.read(begin, end).view(self.dtype(name))
        if not torch.isfinite(value.sum()) and not torch.isfinite(value).all():  # the sum is the fast check
            raise ModelLoadError(f"tensor {name} in {file.path.name} holds NaN or infinity; the file is damaged")
        return value

    def check(self, config: ModelConfig) -> None:
        """Names, shapes and types against the config, before any weight is read."""
        expected = expected_shapes(config)
        missing = [n for n in expected if n not in self._files]
        if missing:
            raise ModelLoadError(
                f"{self.folder}: tensor {missing[0]} is missing ({len(missing)} in all); is it the model that "
                "config.json describes?"
            )
        tied_head = {"lm_head.weight"} if config.tied_embeddings else set()
        extra = [
            n for n in self._files if n not in expected and n not in tied_head and not n.endswith(IGNORED_SUFFIXES)
        ]
        if extra:
            raise ModelLoadError(
                f"{self.folder}: unexpected tensor {sorted(extra)[0]} ({len(extra)} in all); a {config.architecture} "
                "with this config.json has none of that name"
            )
        for name, shape in expected.items():
            entry = self._files[name].entries[name]
            if entry.shape != shape:
                raise ModelLoadError(
                    f"{self.folder}: tensor {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
                )
            if entry.dtype not in DTYPES:
                raise ModelLoadError(
                    f"{self.folder}: tensor {name} is {entry.dtype}; only F32, BF16 and F16 can be read"
                )


class SafetensorsFile:
    """One open file and its checked header. Raises ModelLoadError if it is unsound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise self._unsound(str(error)) from None
        try:
            self.entries = self._header()
        except (OSError, ValueError, RecursionError) as error:
            self.close()
            raise (error if isinstance(error, ModelLoadError) else self._unsound(str(error))) from None

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _unsound(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is not a sound safetensors file ({reason}); download it again")

    def _header(self) -> dict[str, Entry]:
        size = os.fstat(self._file).st_size
        if size < 8:
            raise self._unsound(f"{size} bytes are too few")
        length = struct.unpack("<Q", os.pread(self._file, 8, 0))[0]
        if length > min(MAX_HEADER, size - 8):
            raise self._unsound(f"a header of {length} bytes in a file of {size}")
        text = bytes(self.read(8, 8 + length).numpy()).decode("utf-8")
        raw = json.loads(text, object_pairs_hook=_no_duplicates)
        if not isinstance(raw, dict):
            raise self._unsound("its header is no JSON object")
        raw.pop("__metadata__", None)
        entries = {name: self._entry(name, value, 8 + length) for name, value in raw.items()}
        at = 8 + length  # each byte belongs to one tensor: no overlap, no hole, no end beyond the file's
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != at:
                raise self._unsound(f"tensor {name} begins at byte {entry.begin}, not at {at}")
            at = entry.end
        if at != size:
            raise self._unsound(f"its tensors end at byte {at}, the file at {size}")
        return entries

    def _entry(self, name: str, value: Any, data: int) -> Entry:
        fields = value if isinstance(value, dict) else {}
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        bits = _BITS.get(dtype) if isinstance(dtype, str) else None
        if bits is None or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
            raise self._unsound(f"the header says of tensor {name}: {str(value)[:200]}")
        begin, end = offsets
        if begin > end or (end - begin) * 8 != math.prod(shape) * bits:
            raise self._unsound(f"tensor {name}, {dtype} {shape}, cannot take bytes {begin} to {end}")
        return Entry(str(dtype), tuple(shape), data + begin, data + end)

    def read(self, begin: int, end: int) -> Tensor:
        """Bytes begin..end-1 of the file, uint8, in memory of their own."""
        out = torch.empty(end - begin, dtype=torch.uint8)
        view: memoryview = out.numpy().data  # of the same memory
        done = 0
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], begin + done)
            if count == 0:
                raise self._unsound(f"it ends before byte {end}; was it changed while it was read?")
            done += count
        return out


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**62 for v in value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header names a tensor twice")
    return found
