"""TensorFile: one open file of tensors, read with pread; the base class of the safetensors and GGUF readers.

Files are not memory-mapped, because mapped pages count as the memory of the process as long as the mapping exists.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError


class TensorFile:
    """An open file; a subclass sets `kind` and reads the header, raising ModelLoadError for an invalid one."""

    kind = "tensor"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise self.unsound(str(error)) from None
        try:
            self.size = os.fstat(self.descriptor).st_size
            self.read_header()
        except (OSError, ValueError, OverflowError, RecursionError, struct.error) as error:
            self.close()
            raise (error if isinstance(error, ModelLoadError) else self.unsound(str(error))) from None

    def read_header(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        os.close(self.descriptor)

    def unsound(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is not a sound {self.kind} file ({reason}); download it again")

    def read(self, begin: int, end: int) -> Tensor:
        """Bytes begin..end-1 of the file, uint8, in new memory. Raises ModelLoadError where the file is shorter."""
        out = torch.empty(end - begin, dtype=torch.uint8)
        view: memoryview = out.numpy().data  # shares the memory of `out`
        done = 0
        while done < len(view):
            count = os.preadv(self.descriptor, [view[done:]], begin + done)
            if count == 0:
                raise self.unsound(f"it ends before byte {end}; was it changed while it was read?")
            done += count
        return out
