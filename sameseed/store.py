"""Files of our own: each is written whole or not at all. Those with users' texts are for their owner alone.

Also a disk cache of measurements: arrays in .npz files, keyed by a digest of everything that they depend on. A file
that cannot be read, or makes no sense, is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("sameseed")
Arrays = dict[str, NDArray[Any]]
VARIABLE = "SAMESEED_CACHE"
PRIVATE = 0o600  # mode of files that hold users' texts or token ids
OTHER = (ValueError, TypeError, LookupError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)  # of its content
SAMPLES, SAMPLE = 64, 64 << 10  # pieces read from each weight file for its digest, and bytes per piece


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yields a file that takes the place of `path` once it is on the disk; after an error `path` is as it was.

    `mode`: permissions of the file, less the process's umask. Raises OSError that names `path`.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")  # of its own, if several processes write
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and error.errno:  # of a full disk it names no file, of others the part
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def cache_folder() -> Path:
    """The folder of the measurements: $SAMESEED_CACHE, else `sameseed` in the user's cache folder.

    Raises FileNotFoundError for a user without a home folder.
    """
    own = os.environ.get(VARIABLE)
    try:
        folder = Path(own or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        raise FileNotFoundError("this user has no home folder") from None
    return folder if own else folder / "sameseed"


def digest(parts: Mapping[str, object]) -> str:
    """The first 32 hex digits of the SHA-256 of plain data; other objects are converted with `str`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def weights_key(path: Path) -> str:
    """A digest of a model's files: small files whole; of large files the size, and pieces spread over the file."""
    kinds = (".safetensors", ".json", ".gguf")
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in kinds):
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for i in range(SAMPLES):
                at = i * size // SAMPLES
                stream.seek(at)
                found.update(stream.read(min(SAMPLE, (i + 1) * size // SAMPLES - at)))
    return found.hexdigest()[:32]


def read(kind: str, key: str, is_sound: Callable[[Arrays], bool] = bool) -> Arrays | None:
    """The arrays stored under a key; None without, or if damaged (CRC-32), negative, infinite or not `is_sound`."""
    why: object = "numbers or names that it cannot have"
    try:
        with np.load(_file(kind, key), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files if name != "digest"}  # of earlier versions
        if all((np.isfinite(a) & (a >= 0)).all() for a in arrays.values()) and is_sound(arrays):
            return arrays
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (*OTHER, OSError, MemoryError) as error:
        why = why if isinstance(error, OTHER) else error
    log.warning("%s is broken (%s); it is measured again", _file(kind, key), why)
    return None


def alike(arrays: Arrays, own: Arrays) -> bool:
    """Whether `arrays` have the shapes of those in `own`. Raises KeyError if one is missing."""
    return all(arrays[name].shape == its.shape for name, its in own.items())


def write(kind: str, key: str, arrays: Arrays) -> None:
    """Store arrays under a key. If the folder cannot be written, a warning is logged and nothing is stored."""
    try:
        file = _file(kind, key)
        for folder in (cache_folder(), file.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        save: Any = np.savez_compressed  # NumPy before 2.2 would store `allow_pickle` as an array
        with replacing(file, PRIVATE) as stream:
            save(stream, **arrays)
    except OSError as error:
        log.warning("cannot keep measurements (%s); set %s to a folder that can be written", error, VARIABLE)


def _file(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{key}.npz"
