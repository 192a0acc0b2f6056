"""Resident memory of this process, and its peak since a moment."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")


def resident() -> int:
    """Bytes resident now; where the system does not say, the most there ever were."""
    return _status("VmRSS") or _ever()


def peak() -> int:
    """The most bytes that were resident since `reset_peak`, or ever, where that had no effect."""
    return _status("VmHWM") or _ever()


def reset_peak() -> None:
    """Begin to count the peak anew, where the system allows it (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int | None:
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _ever() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
