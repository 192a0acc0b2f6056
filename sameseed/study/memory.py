"""Memory of this process, and its peak since a moment: what is resident, or what PyTorch holds on a GPU."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def resident(device: str = "cpu") -> int:
    """Bytes resident now; where the system does not say, the most there ever were."""
    if device != "cpu":
        return int(torch.cuda.memory_allocated(device))
    return _status("VmRSS") or _ever()


def peak(device: str = "cpu") -> int:
    """The most bytes that were resident since `reset_peak`, or ever, where that had no effect."""
    if device != "cpu":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM") or _ever()


def reset_peak(device: str = "cpu") -> None:
    """Begin to count the peak anew, where the system allows it (Linux)."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        return
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
