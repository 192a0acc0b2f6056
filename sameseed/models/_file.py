"""TensorFile: one open file of tensors, read with pread; what the readers of safetensors and GGUF share.

Files are not mapped: pages of a map count as the process's own memory for as long as it lasts.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError


class TensorFile:
    """An open file; a subclass names its `kind` and reads its header, raising ModelLoadError where it is unsound."""

    kind = "tensor"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise self.unsound(str(error)) from None
        try:
            self.size = os.fstat(self._file).st_size
            self.read_header()
        except (OSError, ValueError, OverflowError, RecursionError, struct.error) as error:
            self.close()
            raise (error if isinstance(error, ModelLoadError) else self.unsound(str(error))) from None

    def read_header(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        os.close(self._file)

    def unsound(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is not a sound {self.kind} file ({reason}); download it again")

    def read(self, begin: int, end: int) -> Tensor:
        """Bytes begin..end-1 of the file, uint8, in memory of their own."""
        out = torch.empty(end - begin, dtype=torch.uint8)
        view: memoryview = out.numpy().data  # of the same memory
        done = 0
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], begin + done)
            if count == 0:
                raise self.unsound(f"it ends before byte {end}; was it changed while it was read?")
            done += count
        return out
