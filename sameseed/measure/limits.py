"""The machine's limits: memory bandwidth and peak arithmetic rates, measured with the threads that the kernels use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sameseed import devices, registry
from sameseed.devices import available_memory

BYTES = 512 << 20  # of memory that is read: far larger than the CPU's caches
REPEATS = 8
COPIES = 20  # copies in a GPU's memory that are timed together
SECONDS = 0.02  # of one repetition of an arithmetic loop
KINDS = ("int8", "fp32", "bf16")


@dataclass(frozen=True)
class Limits:
    """Peak rates: `read` in bytes per second, the others in operations per second (a multiply-add counts as two).

    Each is the best of its repetitions, because disturbances can only lower a rate; `rates` keeps all repetitions. A
    kind is None if the CPU has no instruction for it. `instructions`: the instruction used for each kind. `source`:
    "native", or "torch" if PyTorch measured (no native module, or a GPU).
    """

    threads: int
    read: float
    int8: float | None
    fp32: float
    bf16: float | None
    instructions: Mapping[str, str]
    rates: Mapping[str, tuple[float, ...]]
    source: str

    def peak(self, kind: str) -> float:
        """Operations per second of matrix products of a kind: "int8", "bf16" or "fp32".

        A kind without instructions of its own has the float32 rate, since float32 instructions then do the work.
        """
        found: float | None = {"int8": self.int8, "bf16": self.bf16, "fp32": self.fp32}[kind]
        return self.fp32 if found is None else found

    def merged(self, other: Limits) -> Limits:
        """The best rates of two measurements of one machine."""
        names = self.rates.keys() | other.rates.keys()
        rates = {name: (*self.rates.get(name, ()), *other.rates.get(name, ())) for name in sorted(names)}
        return from_rates(self.threads, rates, self.instructions, self.source)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a record."""
        return {
            "threads": self.threads,
            "read_bytes_per_s": self.read,
            "int8_ops_per_s": self.int8,
            "fp32_ops_per_s": self.fp32,
            "bf16_ops_per_s": self.bf16,
            "instructions": dict(self.instructions),
            "source": self.source,
            "repetitions": {name: list(rates) for name, rates in self.rates.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Limits:
        """The inverse of as_dict. Raises KeyError or TypeError for other data."""
        rates = {name: tuple(values) for name, values in data["repetitions"].items()}
        return from_rates(data["threads"], rates, data["instructions"], data["source"])


def from_rates(
    threads: int, rates: Mapping[str, tuple[float, ...]], instructions: Mapping[str, str], source: str
) -> Limits:
    """Limits with the best of each kind in `rates`: "read" and "fp32", optionally "int8" and "bf16"."""

    def best(kind: str) -> float | None:
        return max(rates[kind]) if kind in rates else None

    return Limits(
        threads, max(rates["read"]), best("int8"), max(rates["fp32"]), best("bf16"), instructions, rates, source
    )


def measure_limits(threads: int, repeats: int = REPEATS, device: str = "cpu") -> Limits:
    """Measure this machine with `threads` threads. The backends must already use that number. Takes about a second.

    On a GPU: the bandwidth of PyTorch's copy (each byte counts twice, read and written), and PyTorch's matrix products.
    """
    if device != "cpu":
        return _gpu_limits(threads, repeats, torch.device(device))
    size = min(BYTES, available_memory() // 8)
    if "cpu" not in registry.names("ops") or registry.load("ops", "cpu").unavailable() is not None:
        return _torch_limits(threads, repeats, size)
    from sameseed import _native

    rates = {"read": tuple(_native.read_rates(size, 2 * repeats))}
    instructions: dict[str, str] = {}
    for kind in KINDS:
        instruction, found = _native.peak_rates(kind, SECONDS, repeats)
        if found:
            instructions[kind], rates[kind] = instruction, tuple(found)
    return from_rates(threads, rates, instructions, "native")


def _torch_limits(threads: int, repeats: int, size: int) -> Limits:
    """Limits as PyTorch reaches them on the CPU: a sum measures reading, a matrix product measures arithmetic."""
    memory = torch.ones(size // 4)
    side = 512
    a, b = torch.randn(side, side), torch.randn(side, side)
    rates = {
        "read": _torch_rates(memory.sum, float(size), repeats),
        "fp32": _torch_rates(lambda: a @ b, 2.0 * side**3, repeats),
    }
    return from_rates(threads, rates, {"fp32": "PyTorch's matrix product"}, "torch")


def _gpu_limits(threads: int, repeats: int, device: torch.device) -> Limits:
    size, side = min(2 * BYTES, devices.free_memory(str(device)) // 8), 8192
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    rates = {"read": _copy_rates(copy, 2.0 * size, repeats, device)}
    del source, copy
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(side, side, device=device).to(dtype)
        rates[kind] = _torch_rates(partial(torch.matmul, a, a), 2.0 * side**3, repeats, device)
    return from_rates(threads, rates, dict.fromkeys(("fp32", "bf16"), "PyTorch's matrix product"), "torch")


def _copy_rates(copy: Callable[[], object], work: float, repeats: int, device: torch.device) -> tuple[float, ...]:
    """Bytes per second of COPIES copies between two device events: a host clock would include launch and wait."""
    copy()
    rates = []
    event: Any = torch.cuda.Event
    for _ in range(repeats):
        first, last = (event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        first.record(stream)
        for _ in range(COPIES):
            copy()
        last.record(stream)
        last.synchronize()
        rates.append(COPIES * work / (1e-3 * first.elapsed_time(last)))
    return tuple(rates)


def _torch_rates(
    job: Callable[[], object], work: float, repeats: int, device: torch.device | None = None
) -> tuple[float, ...]:
    where = device or torch.device("cpu")
    job()
    devices.wait(where)
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        devices.wait(where)
        rates.append(work / (time.perf_counter() - start))
    return tuple(rates)
