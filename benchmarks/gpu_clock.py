"""Timers for a device: wall time of a job, time in which the device is busy, and the job's time as a CUDA graph."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

Job = Callable[[], object]
WORKING = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of PyTorch's trace in which the device is busy
ENOUGH = 0.02  # target seconds of all replays in one repetition
STAND_IN = "wall clock on the CPU: a stand-in"


@dataclass(frozen=True)
class Busy:
    """Seconds in which a device was busy, the source of that value, and (seconds, launches) by kernel."""

    seconds: float
    source: str
    kernels: dict[str, tuple[float, int]] = field(default_factory=dict)

    def top(self, count: int = 12) -> dict[str, list[float]]:
        """[milliseconds, launches] of the `count` slowest kernels, by name."""
        ordered = sorted(self.kernels.items(), key=lambda item: -item[1][0])[:count]
        return {name[:80]: [1e3 * seconds, launches] for name, (seconds, launches) in ordered}


def is_fault(error: Exception) -> bool:
    """Whether the device itself failed, so that this process cannot use it any more.

    Running out of memory is no fault, nor is a failed graph capture.
    """
    said = str(error)
    device = "CUDA error" in said or ("[CUDA]" in said and "out of memory" not in said)  # PyTorch's words, and Triton's
    return isinstance(error, RuntimeError) and device and "captur" not in said


def wall(job: Job, device: str) -> float:
    """Wall-clock seconds of a job, until the device has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    job()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def busy(job: Job, device: str) -> Busy:
    """Busy time of a device while a job runs, by PyTorch's profiler. On the CPU: the job's wall time."""
    if device == "cpu":
        return Busy(wall(job, device), STAND_IN)
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=kinds) as profile:
            wall(job, device)
        profile.export_chrome_trace(str(path))
        return read_trace(path)


def read_trace(path: Path) -> Busy:
    """Busy time of the device from a trace of PyTorch's profiler; overlapping streams count once.

    Raises RuntimeError if the trace has no device events.
    """
    spans, kernels = [], {}
    for x in json.loads(path.read_text())["traceEvents"]:
        if x.get("ph") == "X" and x.get("cat") in WORKING:
            spans.append((float(x["ts"]), float(x["ts"]) + float(x["dur"])))
            seconds, count = kernels.get(x["name"], (0.0, 0))
            kernels[x["name"]] = (seconds + 1e-6 * float(x["dur"]), count + 1)
    if not spans:
        raise RuntimeError("the profiler saw nothing of the device")
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return Busy(1e-6 * total, "PyTorch's profiler", kernels)


def graphed(job: Job, device: str, repeats: int = 5) -> list[float]:
    """Seconds of a job as a CUDA graph, without host time: one value per repetition, each the mean of several replays.

    On the CPU, which has no graphs: the job's wall time. Raises what the capture raises.
    """
    if device == "cpu":
        job()
        return [wall(job, device) for _ in range(repeats)]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # warm-up: a capture must not compile or allocate anything
        for _ in range(2):
            job()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        job()
    once = wall(graph.replay, device)
    return launched(graph.replay, repeats, count=max(1, min(50, int(ENOUGH / max(once, 1e-6)))))


def launched(job: Job, repeats: int = 5, count: int = 1) -> list[float]:
    """Seconds per call between two device events around `count` calls, per repetition; includes launch time."""
    taken = []
    for _ in range(repeats):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(count):
            job()
        last.record()
        last.synchronize()
        taken.append(1e-3 * first.elapsed_time(last) / count)
    return taken


def device_time(job: Job, device: str, repeats: int = 5) -> tuple[float, str]:
    """Median seconds of a job on the device, and the method: a CUDA graph or, if capturing fails, device events."""
    try:
        return statistics.median(graphed(job, device, repeats)), STAND_IN if device == "cpu" else "graph"
    except RuntimeError as error:
        if is_fault(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        torch.cuda.synchronize(device)
        job()
        return statistics.median(launched(job, repeats)), f"events: {str(error).splitlines()[0][:120]}"
