"""Devices by name: availability, free memory, copies and synchronization; and a description of the CPU."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
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
        return (
            f"PyTorch {torch.__version__} is built without CUDA; install a CUDA build (`pip install torch` from PyPI, "
            "on Linux)"
        )
    return f"no driver answers; `nvidia-smi` must show a GPU, and its driver must know CUDA {torch.version.cuda}"


def check(name: str) -> None:
    """Raise ConfigError, with the remedy, for an unknown device name or a device that does not exist here."""
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
    """The product name of a GPU; None for other devices."""
    return torch.cuda.get_device_name(torch.device(name)) if name.partition(":")[0] == "cuda" else None


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take without swapping; 4 GiB, a cautious value, where nothing tells.

    The least of what the machine has, what is left of its control groups' limits (memory.max and memory.high of version
    2, memory.limit_in_bytes of version 1, of every group around it), and of RLIMIT_AS and RLIMIT_DATA. `root`: of /proc
    and /sys.
    """
    rooms = [*_group_rooms(root), *_rlimit_rooms()]
    with suppress(OSError, KeyError, ValueError):
        rooms.append(_sizes(root / "proc/meminfo")["MemAvailable:"] * 1024)
    return max(0, min(rooms, default=4 << 30))


# By version of control groups: where they are mounted, their limits and use, and how memory.stat names files' pages.
_GROUPS: dict[int, tuple[tuple[str, ...], tuple[str, ...], str, str, str]] = {
    1: (("memory",), ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", "mapped_file"),
    2: (("", "unified"), ("memory.max", "memory.high"), "memory.current", "", "file_mapped"),
}


def _group_rooms(root: Path) -> Iterator[int]:
    """Bytes left in each memory control group that this process is in."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and "memory" not in controllers.split(","):
            continue
        mounts, limits, usage, total, mapped = _GROUPS[version]
        # In a container the path may be the host's; then only the mount itself is there, and it is the container's.
        parts = [part for part in PurePosixPath(path.lstrip("/")).parts if part != ".."]
        folders = [(root / "sys/fs/cgroup" / m).joinpath(*parts[:n]) for m in mounts for n in range(len(parts) + 1)]
        for folder in folders:
            found: list[int] = []
            for limit in limits:
                with suppress(OSError, ValueError):  # "max" is no number
                    found.append(int((folder / limit).read_text()))
            if not found:
                continue
            with suppress(OSError, ValueError, KeyError):
                held, stat = int((folder / usage).read_text()), _sizes(folder / "memory.stat")
                # Pages of files that nobody has mapped are dropped when memory is needed.
                files = stat[f"{total}inactive_file"] + stat[f"{total}active_file"] - stat[f"{total}{mapped}"]
                yield min(found) - held + max(0, files)


def _rlimit_rooms() -> Iterator[int]:
    """Bytes left of this process's own limits, which count reserved memory, too."""
    with suppress(ImportError, OSError):  # other systems than Linux
        import resource

        pages = [int(x) * resource.getpagesize() for x in Path("/proc/self/statm").read_text().split()]
        for kind, held in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
                yield limit - held


def _sizes(file: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    return {words[0]: int(words[1]) for line in file.read_text().splitlines() if len(words := line.split()) > 1}


def free_memory(name: str) -> int:
    """Bytes free on a CUDA device."""
    return int(torch.cuda.mem_get_info(torch.device(name))[0])


def memory_room(name: str, share: float) -> tuple[int, int, int]:
    """Bytes of a CUDA device that may be taken if `share` of its memory is allowed, then its free and total bytes.

    Memory that this process holds already counts as part of the share.
    """
    device = torch.device(name)
    free, total = (int(x) for x in torch.cuda.mem_get_info(device))
    return max(0, min(free, int(share * total) - int(torch.cuda.memory_allocated(device)))), free, total


def put(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device, from pinned memory, so that the host need not wait for the copy."""
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def put_into(there: torch.Tensor, x: torch.Tensor) -> None:
    """Copy CPU tensor `x` into a device's tensor, as `put` does. `x` must not change before the copy is done."""
    there.copy_(x.pin_memory() if there.device.type == "cuda" else x, non_blocking=True)


def read(x: torch.Tensor) -> list[Any]:
    """A tensor's numbers as lists. The host waits for the device to compute them."""
    numbers: list[Any] = x.tolist()
    return numbers


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work. Times measured without this are meaningless."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe() -> dict[str, Any]:
    """The GPUs, or the reason why there are none, as plain data."""
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
