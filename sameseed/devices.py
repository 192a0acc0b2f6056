"""Devices by name: whether they are here, what is free on them, and waiting for them; and what the CPU is."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from sameseed import registry
from sameseed.errors import ConfigError


def cpu_name() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def native_isa() -> str | None:
    """Instruction set of the native kernels; None without them."""
    if "cpu" not in registry.names("ops") or (module := registry.load("ops", "cpu")).unavailable():
        return None
    return str(module.isa())


def native_threads() -> int:
    """Threads of the native kernels, or of PyTorch without them."""
    if native_isa() is None:
        return torch.get_num_threads()
    from sameseed import _native

    return _native.num_threads()


def no_cuda() -> str | None:
    """Why PyTorch has no CUDA GPU here, with the remedy; None if it has."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} is built without CUDA; install a CUDA build (`pip install torch` from PyPI, "
            "on Linux)"
        )
    return f"no driver answers; `nvidia-smi` must show a GPU, and its driver must know CUDA {torch.version.cuda}"


def check(name: str) -> None:
    """Raises ConfigError, with the remedy, for a device that has no such name or is not here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ConfigError(f"device {name!r} is none that sameseed knows; use cpu, cuda, or cuda:N for GPU number N")
    if device.type == "cpu":
        return
    if (reason := no_cuda()) is not None:
        raise ConfigError(f"device {name!r}: PyTorch sees no CUDA GPU here: {reason}; or use --device cpu")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        there = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise ConfigError(f"device {name!r} is not here; there is {there}")


def title(name: str) -> str | None:
    """What a GPU calls itself; None for a device that is none."""
    return torch.cuda.get_device_name(torch.device(name)) if name.partition(":")[0] == "cuda" else None


def free_memory(name: str) -> int:
    """Bytes free on a CUDA device."""
    return int(torch.cuda.mem_get_info(torch.device(name))[0])


def memory_room(name: str, share: float) -> tuple[int, int, int]:
    """Bytes that may be taken of a CUDA device where `share` of all it has may be: these, what is free, and all.

    What this process holds already counts: its own weights are part of its share.
    """
    device = torch.device(name)
    free, total = (int(x) for x in torch.cuda.mem_get_info(device))
    return max(0, min(free, int(share * total) - int(torch.cuda.memory_allocated(device)))), free, total


def put(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device: from pinned memory, so that the host need not wait for the copy."""
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def put_into(there: torch.Tensor, x: torch.Tensor) -> None:
    """Numbers of the CPU into a tensor of a device, likewise: x is not to change before the device has them."""
    there.copy_(x.pin_memory() if there.device.type == "cuda" else x, non_blocking=True)


def read(x: torch.Tensor) -> list[Any]:
    """A tensor's numbers: the host waits for what computes them."""
    numbers: list[Any] = x.tolist()
    return numbers


def wait(device: torch.device) -> None:
    """Until the device has done what it was given: a clock read before that tells nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe() -> dict[str, Any]:
    """The GPUs, or why there are none, as plain data."""
    reason = no_cuda()
    if reason is not None:
        return {"gpus": [], "reason": reason}
    gpus = []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        free, total = torch.cuda.mem_get_info(i)
        gpus.append(
            {
                "device": f"cuda:{i}",
                "name": torch.cuda.get_device_name(i),
                "capability": f"{major}.{minor}",
                "multiplies": "bf16, fp16, int8" + (", fp8" if (major, minor) >= (8, 9) else ""),
                "memory_bytes": int(total),
                "free_bytes": int(free),
            }
        )
    return {"gpus": gpus, "reason": None, "cuda": torch.version.cuda}
