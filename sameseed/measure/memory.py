"""Memory of this process, now and at its peak: resident memory on the CPU, PyTorch's allocations on a GPU."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def resident(device: str = "cpu") -> int:
    """Bytes resident now; if the system does not tell, the peak since the process started."""
    if device != "cpu":
        return int(torch.cuda.memory_allocated(device))
    return _status("VmRSS") or _ever()


def peak(device: str = "cpu") -> int:
    """Peak resident bytes since `reset_peak`, or since the process started if `reset_peak` had no effect."""
    if device != "cpu":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM") or _ever()


def reset_peak(device: str = "cpu") -> None:
    """Reset the peak, if the system allows it (Linux)."""
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
