"""A disk cache of measurements: arrays in .npz files, keyed by a digest of everything that they depend on.

A file that cannot be read is ignored with a warning, and the measurement is repeated.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("sameseed")
Arrays = dict[str, NDArray[Any]]
VARIABLE = "SAMESEED_CACHE"
SAMPLES, SAMPLE = 64, 64 << 10  # pieces read from each weight file for its digest, and bytes per piece


def cache_folder() -> Path:
    """The folder of the measurements: $SAMESEED_CACHE, else `sameseed` in the user's cache folder."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sameseed"


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


def read(kind: str, key: str) -> Arrays | None:
    """The arrays stored under a key; None if there are none, or if they cannot be read."""
    file = _file(kind, key)
    try:
        with np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        refuse(kind, key, error)
        return None


def refuse(kind: str, key: str, why: object) -> None:
    """Log that the file of a key is broken and that the measurement is repeated."""
    log.warning("%s is broken (%s); it is measured again", _file(kind, key), why)


def write(kind: str, key: str, arrays: Arrays) -> None:
    """Store arrays under a key. If the folder cannot be written, a warning is logged and nothing is stored."""
    file = _file(kind, key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as stream:
                np.savez_compressed(stream, allow_pickle=False, **arrays)
            os.replace(name, file)  # atomic, also if other processes write the same file
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        log.warning(
            "cannot keep measurements in %s (%s); set %s to a folder that can be written", file, error, VARIABLE
        )


def _file(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{key}.npz"
