"""Write a dense checkpoint from any source of weights, in chunks of rows, so that no matrix is whole in memory."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch

from sameseed.errors import ModelSaveError
from sameseed.models.config import ModelConfig
from sameseed.models.safetensors_file import name_files, safetensors_head, write_file
from sameseed.models.save import SHARD
from sameseed.models.weights import Progress, Shapes, TensorSource, expected_shapes

CHUNK = 1 << 20  # values that are in memory at one time
SPARE = 64 << 20  # bytes of disk space required beyond the tensors: tokenizer, index, file system overhead


def stream_weights(
    folder: Path,
    config: ModelConfig,
    source: TensorSource,
    progress: Progress | None = None,
    shard_bytes: int = SHARD,
    shapes: Shapes | None = None,
) -> None:
    """Write every tensor of a model to safetensors files of at most `shard_bytes` (or one tensor, if that is larger).

    `progress(done, total)` counts values. `shapes`: of all tensors, if they are not those of a whole model (but of a
    draft head).
    """
    shapes = shapes or expected_shapes(config)
    total, done = sum(math.prod(s) for s in shapes.values()), 0

    def pieces(names: list[str]) -> Iterator[memoryview]:
        nonlocal done
        for name in names:
            shape = shapes[name]
            step = max(1, CHUNK // shape[-1])
            starts = range(0, shape[0], step) if len(shape) == 2 else (None,)
            for start in starts:
                rows = source.tensor(name) if start is None else source.rows(name, start, min(start + step, shape[0]))
                yield rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                done += rows.numel()
                if progress is not None:
                    progress(done, total)

    files: list[tuple[Path, list[str]]] = []
    for names in _shards(shapes, source, shard_bytes):
        path = folder / f"part-{len(files)}"
        names.sort(key=lambda n: -source.dtype(n).itemsize)  # wide types first, so that all tensors are aligned
        head = safetensors_head((n, source.dtype(n), shapes[n]) for n in names)
        write_file(path, chain([head], pieces(names)))
        files.append((path, names))
    name_files(folder, files, num_bytes(config, source, shapes))


def _shards(shapes: Mapping[str, tuple[int, ...]], source: TensorSource, most: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        own = math.prod(shape) * source.dtype(name).itemsize
        if names and size + own > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names


def num_bytes(config: ModelConfig, source: TensorSource, shapes: Shapes | None = None) -> int:
    """Bytes that the tensors of a model take in a file; `shapes` as in `stream_weights`."""
    return sum(math.prod(s) * source.dtype(n).itemsize for n, s in (shapes or expected_shapes(config)).items())


def check_room(out: Path, needed: int) -> None:
    """Raises ModelSaveError where the disk of `out` has no room for `needed` bytes."""
    place = Path(os.path.abspath(out)).parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed + SPARE:
        raise ModelSaveError(
            f"{out} needs {needed / 1e9:.1f} GB and {place} has {max(0, free - SPARE) / 1e9:.1f} GB left; make room, "
            "go elsewhere, or take a smaller shape"
        )
