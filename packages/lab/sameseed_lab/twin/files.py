"""The files of a twin: its tensors, written some rows at a time, so that no matrix is whole in memory."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence as Seq
from itertools import chain
from pathlib import Path

import torch

from sameseed.errors import ModelSaveError
from sameseed.models.safetensors_file import name_files, safetensors_head, write_file
from sameseed.models.save import SHARD
from sameseed.models.weights import Progress, Shapes, TensorSource

CHUNK = 1 << 20  # values that are in memory at one time
SPARE = 64 << 20  # bytes of disk space required beyond the tensors: tokenizer, index, file system overhead


def num_bytes(source: TensorSource, shapes: Shapes) -> int:
    """Bytes that tensors take in a file."""
    return sum(math.prod(shape) * source.dtype(name).itemsize for name, shape in shapes.items())


def check_room(out: Path, needed: int) -> None:
    """Raises ModelSaveError where the disk of `out` has no room for `needed` bytes."""
    place = next(folder for folder in Path(os.path.abspath(out)).parents if folder.exists())
    free = shutil.disk_usage(place).free - SPARE
    if free < needed:
        left = max(0, free) / 1e9
        raise ModelSaveError(f"{out} needs {needed / 1e9:.1f} GB and {place} has {left:.1f} GB left; make room")


def stream_weights(
    folder: Path, source: TensorSource, shapes: Shapes, progress: Progress | None = None, shard: int = SHARD
) -> None:
    """Write tensors to safetensors files of at most `shard` bytes (or one tensor); `progress(done, total)`: values."""
    total, done = sum(map(math.prod, shapes.values())), 0

    def pieces(names: Seq[str]) -> Iterator[memoryview]:
        nonlocal done
        for name in names:
            height, step = shapes[name][0], max(1, CHUNK // shapes[name][-1])
            for start in range(0, height, step) if len(shapes[name]) == 2 else (None,):
                part = source.tensor(name) if start is None else source.rows(name, start, min(start + step, height))
                yield part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                done += part.numel()
                if progress is not None:
                    progress(done, total)

    shards, room = list[list[str]](), 0
    for name, shape in shapes.items():
        size = num_bytes(source, {name: shape})
        if not shards or size > room:
            shards.append([])
            room = shard
        shards[-1].append(name)
        room -= size
    files = [(folder / f"part-{i}", names) for i, names in enumerate(shards)]
    for path, names in files:
        names.sort(key=lambda n: -source.dtype(n).itemsize)  # wide types first, so that all tensors are aligned
        head = safetensors_head((n, source.dtype(n), shapes[n]) for n in names)
        write_file(path, chain([head], pieces(names)))
    name_files(folder, files, num_bytes(source, shapes))
