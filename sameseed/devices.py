"""Devices by name: availability, free memory of a GPU, copies and synchronization; and a description of the CPU."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from sameseed import registry
from sameseed.errors import ConfigError


def cpu_name() -> str:
    """The processor's model name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def native_isa() -> str | None:
    """Instruction set of the native kernels; None if they are not available."""
    if "cpu" not in registry.names("ops") or (module := registry.load("ops", "cpu")).unavailable():
        return None
    return str(module.isa())


def native_threads() -> int:
    """Number of threads of the native kernels, or of PyTorch if there are none."""
    if native_isa() is None:
        return torch.get_num_threads()
    from sameseed import _native

    return _native.num_threads()


def no_cuda() -> str | None:
    """Why PyTorch has no CUDA GPU here, with the remedy; None if it has."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        remedy = "install a CUDA build (`pip install torch` from PyPI, on Linux)"
        return f"PyTorch {torch.__version__} is built without CUDA; {remedy}"
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) in ("", "-1"):
        return f"the environment hides all GPUs (CUDA_VISIBLE_DEVICES={hidden!r}); unset it"
    return f"no driver answers; `nvidia-smi` must show a GPU, and its driver must know CUDA {torch.version.cuda}"


def check(name: str) -> None:
    """Raise ConfigError, with the remedy, for an unknown device name or a device that does not exist here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and name != "cpu"):
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
    """The product name of a GPU; None for other devices."""
    return torch.cuda.get_device_name(torch.device(name)) if name.partition(":")[0] == "cuda" else None


def memory_room(name: str, share: float = 1.0) -> tuple[int, int, int]:
    """Bytes of a CUDA device that may still be taken if `share` of it may be, then its free and total bytes."""
    device = torch.device(name)
    free, total = (int(x) for x in torch.cuda.mem_get_info(device))
    return max(0, min(free, int(share * total) - int(torch.cuda.memory_allocated(device)))), free, total


def put(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device, from pinned memory, so that the host need not wait for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def put_into(there: torch.Tensor, x: torch.Tensor) -> None:
    """Copy CPU tensor `x` into a device's tensor, as `put` does. `x` must not change before the copy is done."""
    there.copy_(x.pin_memory() if there.device.type == "cuda" else x, non_blocking=True)


def read(x: torch.Tensor) -> list[Any]:
    """A tensor's numbers as lists. The host waits for the device to compute them."""
    return x.tolist()


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work. Times measured without this are meaningless."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe() -> dict[str, Any]:
    """The GPUs, or the reason why there are none, as plain data."""
    if (reason := no_cuda()) is not None:
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
