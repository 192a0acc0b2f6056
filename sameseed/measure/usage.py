"""Use of the machine during a measurement: CPU time, energy, GPU utilization, kernel launches, memory of this process.

A value that cannot be read is None.

CPU energy is that of the whole packages (RAPL, through Linux's powercap), including other processes. GPU values come
from NVML, if the package `pynvml` is installed. Memory is resident memory on the CPU, PyTorch's allocations on a GPU.
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


@dataclass
class Usage:
    """Use of the machine in `seconds` of wall time.

    `cpu_s`: CPU seconds, summed over threads. `cpu_j`, `gpu_j`: joules. `gpu_share`: GPU utilization (0 to 1), sampled
    by NVML at the end. `launches`: of kernels, on the CPU and the GPU (`ops.num_launches`).
    """

    seconds: float = 0.0
    cpu_s: float | None = 0.0
    cpu_j: float | None = 0.0
    gpu_j: float | None = 0.0
    gpu_share: float | None = 0.0
    launches: int | None = 0

    def add(self, other: Usage) -> None:
        """Add another measurement to this one, in place. `gpu_share` becomes the time-weighted mean."""
        whole = self.seconds + other.seconds
        if self.gpu_share is not None and other.gpu_share is not None and whole:
            mixed = self.gpu_share * self.seconds + other.gpu_share * other.seconds
            self.gpu_share = mixed / whole
        else:
            self.gpu_share = None
        for name in ("cpu_s", "cpu_j", "gpu_j", "launches"):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, None if mine is None or its is None else mine + its)
        self.seconds = whole

    def as_dict(self, num_tokens: int) -> dict[str, float | None]:
        """Plain data for a record: shares of all cores and the GPU; joules and launches per token of `num_tokens`."""
        cores, tokens = available_cores() * self.seconds, max(1, num_tokens)
        return {
            "cpu_share": None if self.cpu_s is None or not cores else self.cpu_s / cores,
            "gpu_share": self.gpu_share,
            "cpu_j_per_token": None if self.cpu_j is None else self.cpu_j / tokens,
            "gpu_j_per_token": None if self.gpu_j is None else self.gpu_j / tokens,
            "launches_per_token": None if self.launches is None else self.launches / tokens,
        }


class Meter:
    """Measures use from its creation on: of this process, or of the process `pid` and its descendants."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._joules, self._gpu = packages_j(), _gpu_j()
        self._launches = num_launches()
        self._cpu, self._start = self._cpu_s(), time.perf_counter()

    def read(self) -> Usage:
        """Use since the meter was created."""
        seconds, cpu = time.perf_counter() - self._start, self._cpu_s()
        joules, gpu = packages_j(), _gpu_j()
        return Usage(
            seconds,
            None if cpu is None or self._cpu is None else cpu - self._cpu,
            None if joules is None or self._joules is None or joules < self._joules else joules - self._joules,
            None if gpu is None or self._gpu is None else gpu - self._gpu,
            _gpu_share(),
            num_launches() - self._launches if self._pid is None else None,
        )

    def _cpu_s(self) -> float | None:
        return time.process_time() if self._pid is None else tree_s(self._pid)


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
def _nvml() -> tuple[Any, Any] | None:
    """The NVML module and the handle of the first GPU; None if NVML does not work."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # not installed, no driver or no GPU: NVML has an exception class for each
        return None


def _asked(question: str) -> Any:
    """NVML's answer to a question about the GPU; None if it cannot tell (older GPUs have no energy counter)."""
    if (found := _nvml()) is None:
        return None
    try:
        return getattr(found[0], question)(found[1])
    except Exception:  # NVML has an exception class for each reason
        return None


def _gpu_j() -> float | None:
    joules = _asked("nvmlDeviceGetTotalEnergyConsumption")
    return None if joules is None else joules / 1e3


def _gpu_share() -> float | None:
    rates = _asked("nvmlDeviceGetUtilizationRates")
    return None if rates is None else rates.gpu / 100


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
