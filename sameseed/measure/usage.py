"""Use of the machine during a measurement: CPU time, energy, GPU utilization, kernel launches, memory of this process.

A value that cannot be read is None. CPU energy is that of the whole packages (RAPL), other processes included; GPU
values come from NVML, if `pynvml` is installed. Memory is resident on the CPU, PyTorch's allocations on a GPU.
"""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sameseed.ops import available_cores, num_launches

POWERCAP = Path("/sys/class/powercap")
PROC = Path("/proc")
COUNTED = ("cpu_s", "cpu_j", "gpu_j", "launches")  # what a `Meter` counts besides seconds


@dataclass
class Usage:
    """Use of the machine in `seconds` of wall time."""

    seconds: float = 0.0
    cpu_s: float | None = 0.0  # CPU seconds, summed over threads
    cpu_j: float | None = 0.0  # joules
    gpu_j: float | None = 0.0
    gpu_s: float | None = 0.0  # seconds times the utilization (0 to 1) that NVML tells at the end
    launches: float | None = 0  # of kernels, as by `ops.num_launches`

    def add(self, other: Usage) -> None:
        """Add another measurement to this one, in place; what one of both lacks, the sum lacks."""
        for name, own in vars(self).items():
            its = getattr(other, name)
            setattr(self, name, None if own is None or its is None else own + its)

    def as_dict(self, num_tokens: int) -> dict[str, float | None]:
        """Plain data for a record: shares of all cores and the GPU; joules and launches per token of `num_tokens`."""
        shares = {"cpu_share": (self.cpu_s, available_cores() * self.seconds), "gpu_share": (self.gpu_s, self.seconds)}
        rates = {f"{name}_per_token": (getattr(self, name), max(1, num_tokens)) for name in COUNTED[1:]}
        found = {**shares, **rates}
        return {name: used / whole if used is not None and whole else None for name, (used, whole) in found.items()}


class Meter:
    """Measures use from its creation on: of this process, or of the process `pid` and its descendants."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._before, self._start = self._counters(), time.perf_counter()

    def read(self) -> Usage:
        """Use since the meter was created. A counter that began anew meanwhile is unreadable."""
        seconds, pairs = time.perf_counter() - self._start, zip(self._before, self._counters(), strict=True)
        used = [None if old is None or new is None or new < old else new - old for old, new in pairs]
        busy = _gpu("nvmlDeviceGetUtilizationRates", 100)
        return Usage(seconds, gpu_s=None if busy is None else busy * seconds, **dict(zip(COUNTED, used, strict=True)))

    def _counters(self) -> tuple[float | None, ...]:
        """The values of COUNTED now."""
        cpu_s = time.process_time() if self._pid is None else tree_s(self._pid)
        energy = packages_j(), _gpu("nvmlDeviceGetTotalEnergyConsumption", 1e3)
        return cpu_s, *energy, num_launches() if self._pid is None else None


def tree_s(pid: int) -> float | None:
    """CPU seconds of a process and its descendants; None if there is no /proc, or no such process."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            words = stat.read_text().rpartition(")")[2].split()  # the process name before ")" may hold anything
            child = int(stat.parent.name)
            parents[child], ticks[child] = int(words[1]), int(words[11]) + int(words[12])
    if pid not in ticks:
        return None
    found = {pid}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return sum(ticks[p] for p in found) / os.sysconf("SC_CLK_TCK")


def packages_j() -> float | None:
    """Joules on the energy counters of the CPU's packages; None if unreadable (often only root may read them)."""
    zones = [zone for zone in POWERCAP.glob("intel-rapl:*") if zone.name.count(":") == 1]
    try:
        return sum(int((zone / "energy_uj").read_text()) for zone in zones) / 1e6 if zones else None
    except (OSError, ValueError):
        return None


@cache
def _nvml() -> tuple[Any, Any]:
    """The NVML module and the handle of the first GPU, or twice None."""
    with suppress(Exception):  # not installed, no driver or no GPU: NVML has an exception class for each
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    return None, None


def _gpu(question: str, unit: float) -> float | None:
    """NVML's answer to a question about the GPU, over `unit`; None if it cannot tell."""
    nvml, gpu = _nvml()
    with suppress(Exception):  # no NVML, or an older GPU, which has no energy counter
        found = getattr(nvml, question)(gpu)
        return float(getattr(found, "gpu", found)) / unit
    return None


def resident(device: str = "cpu") -> int:
    """Bytes resident now; if the system does not tell, the peak since the process started."""
    return _status("VmRSS") if device == "cpu" else int(torch.cuda.memory_allocated(device))


def peak(device: str = "cpu") -> int:
    """Peak resident bytes since `reset_peak`, or since the process started if `reset_peak` had no effect."""
    return _status("VmHWM") if device == "cpu" else int(torch.cuda.max_memory_allocated(device))


def reset_peak(device: str = "cpu") -> None:
    """Reset the peak, if the system allows it (Linux)."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    """Bytes that the system tells of this process; where it does not, the peak since the process started."""
    with suppress(OSError):
        for line in (PROC / "self" / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
