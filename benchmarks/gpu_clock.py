"""Clocks of a device: what a pass takes by the wall, what the device itself works of it, and one launch as a graph."""

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
WORKING = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of PyTorch's trace that are the device at work
ENOUGH = 0.02  # seconds that the replays of a graph take together
STAND_IN = "wall clock on the CPU: a stand-in"


@dataclass(frozen=True)
class Busy:
    """Seconds that a device worked, who says so, and seconds and launches by kernel."""

    seconds: float
    source: str
    kernels: dict[str, tuple[float, int]] = field(default_factory=dict)

    def top(self, count: int = 12) -> dict[str, list[float]]:
        """Milliseconds and launches of the kernels that took most."""
        ordered = sorted(self.kernels.items(), key=lambda item: -item[1][0])[:count]
        return {name[:80]: [1e3 * seconds, launches] for name, (seconds, launches) in ordered}


def is_fault(error: Exception) -> bool:
    """Whether the device itself failed: nothing runs there in this process from then on.

    A full memory is no fault, nor is a graph that could not be captured.
    """
    said = str(error)
    device = "CUDA error" in said or ("[CUDA]" in said and "out of memory" not in said)  # PyTorch's words, and Triton's
    return isinstance(error, RuntimeError) and device and "captur" not in said


def wall(job: Job, device: str) -> float:
    """Seconds of a job, the device's work included."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    job()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def busy(job: Job, device: str) -> Busy:
    """What a device works while a job runs, by PyTorch's profiler; on the CPU the job's own time stands in."""
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
    """What a trace of PyTorch's profiler says of the device. Streams side by side count once."""
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
    """Seconds of a job as a CUDA graph, which has no host in it: one number a repetition, each of several replays.

    On the CPU, which has no graphs, the job's own time. Raises what a capture raises.
    """
    if device == "cpu":
        job()
        return [wall(job, device) for _ in range(repeats)]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # warm: nothing may be compiled or allocated anew in a capture
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
    """Seconds of a job between two events, each of `count` calls: what launches it counts too."""
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
    """Median seconds of a job on the device, and how they were found: by a graph, or where that fails by events."""
    try:
        return statistics.median(graphed(job, device, repeats)), STAND_IN if device == "cpu" else "graph"
    except RuntimeError as error:
        if is_fault(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        torch.cuda.synchronize(device)
        job()
        return statistics.median(launched(job, repeats)), f"events: {str(error).splitlines()[0][:120]}"
