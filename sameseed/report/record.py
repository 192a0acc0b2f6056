"""Records of measurements: one JSON line each, appended and never changed. The source of all numbers in the docs."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch

import sameseed
from sameseed.devices import cpu_name, native_isa, native_threads
from sameseed.errors import ConfigError
from sameseed.report.schemas import check

log = logging.getLogger("sameseed")


def now() -> str:
    """The current time, ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@cache
def commit() -> str:
    """The checkout's commit (12 digits), with "+" if a source file was changed; without a checkout, the version."""
    root = Path(sameseed.__file__).resolve().parent.parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        folder, head = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        if Path(folder) != root:
            return sameseed.__version__
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "sameseed", "csrc")
    except (OSError, subprocess.CalledProcessError, ValueError):
        return sameseed.__version__
    return head[:12] + ("+" if changed.strip() else "")


def machine() -> dict[str, object]:
    """Properties of the machine that the numbers depend on, without its host name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_name(),
        "cores": cores,
        "isa": native_isa(),
        "threads": native_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def origin(schema: str, here: Mapping[str, object] | None = None) -> dict[str, Any]:
    """The fields with which every record begins: schema, time, commit, machine. `here`: the machine, if read before."""
    return {"schema": schema, "time": now(), "commit": commit(), "machine": dict(machine() if here is None else here)}


def model_name(model: str) -> str:
    """A name in a record for a model, or a chain "A > B": of folders and files without paths, which may be private."""
    return " > ".join(Path(part).resolve().name if Path(part).exists() else part for part in model.split(" > "))


def prepare(path: Path, flag: str = "--out") -> None:
    """Check before a measurement that records can be written to `path`. Raises ConfigError naming the flag."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a", encoding="utf-8").close()
        if new:
            path.unlink()  # a measurement that fails later should not leave an empty file
    except OSError as error:
        raise ConfigError(f"cannot write records to {path} ({error.strerror}); choose another with {flag}") from None


def require(what: str, extra: str, *modules: str) -> None:
    """Raise ConfigError naming the extra where one of these modules, which `what` needs, is not installed."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{what} needs {', '.join(missing)}; install with: pip install '.[{extra}]'")


def append(path: Path, record: Mapping[str, object]) -> None:
    """Append one line to a record file, which is created if missing. Raises ConfigError, and OSError with its name."""
    check(record)
    prepare(path)
    try:
        with path.open("ab+") as file:
            file.seek(-1 if file.tell() else 0, os.SEEK_CUR)
            whole = file.read() in (b"", b"\n")  # a line may have been cut off when its process was killed
            file.write(b"\n" * (not whole) + json.dumps(record).encode() + b"\n")
    except OSError as error:  # of a full disk: it names no file
        raise OSError(error.errno, error.strerror, str(path)) from None


def read(path: Path, skip_broken: bool = False) -> list[dict[str, Any]]:
    """All records of a file, checked. Raises ConfigError naming a broken line; `skip_broken`: it is logged instead."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            check(record)
            records.append(record)
        except (json.JSONDecodeError, ConfigError, AttributeError) as error:
            if not skip_broken:
                raise ConfigError(f"{path}:{number}: {error}") from None
            log.warning("%s:%d is broken (%s); it is measured again", path, number, error)
    return records
