"""The machine's limits: memory bandwidth and peak arithmetic rates, measured with the threads that the kernels use."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sameseed import devices, registry
from sameseed.memory import available_memory

BYTES = 512 << 20  # of memory that is read: far larger than the CPU's caches
REPEATS = 8
COPIES = 20  # calls on a GPU that are timed together
SECONDS = 0.02  # of one repetition of an arithmetic loop
KINDS = ("int8", "fp32", "bf16")


@dataclass(frozen=True)
class Limits:
    """Rates by repetition of what this CPU has; the best is the limit, because disturbances can only lower a rate."""

    threads: int
    rates: Mapping[str, tuple[float, ...]]  # "read" in bytes/s; KINDS in operations/s (a multiply-add is two)
    instructions: Mapping[str, str]  # used for each kind
    source: str  # "native", or "torch": PyTorch measured (no native module, or a GPU)

    def best(self, kind: str) -> float | None:
        """The limit of a kind; None without an instruction for it."""
        return max(self.rates[kind]) if kind in self.rates else None

    @property
    def read(self) -> float:
        return max(self.rates["read"])

    def peak(self, kind: str) -> float:
        """Operations per second of matrix products of a kind, which float32 does where no instruction is for it."""
        return max(self.rates.get(kind, self.rates["fp32"]))

    def merged(self, other: Limits) -> Limits:
        """The rates of two measurements of one machine."""
        names = sorted(self.rates.keys() | other.rates.keys())
        return replace(self, rates={n: (*self.rates.get(n, ()), *other.rates.get(n, ())) for n in names})

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a record."""
        return {
            "threads": self.threads,
            "read_bytes_per_s": self.read,
            **{f"{kind}_ops_per_s": self.best(kind) for kind in KINDS},
            "instructions": dict(self.instructions),
            "source": self.source,
            "repetitions": {name: list(rates) for name, rates in self.rates.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Limits:
        """The inverse of as_dict. Raises KeyError or TypeError for other data."""
        given = data["repetitions"]
        rates = {name: tuple(given[name]) for name in ("read", "fp32", *given)}
        return cls(data["threads"], rates, data["instructions"], data["source"])


def measure_limits(threads: int, repeats: int = REPEATS, device: str = "cpu") -> Limits:
    """Measure this machine with `threads` threads, which the backends must already use; a GPU with PyTorch."""
    native = "cpu" in registry.names("ops") and registry.load("ops", "cpu").unavailable() is None
    if device != "cpu" or not native:
        return _torch_limits(threads, repeats, torch.device(device))
    from sameseed import _native

    rates = {"read": tuple(_native.read_rates(min(BYTES, available_memory() // 8), 2 * repeats))}
    instructions: dict[str, str] = {}
    for kind in KINDS:
        instruction, found = _native.peak_rates(kind, SECONDS, repeats)
        if found:
            instructions[kind], rates[kind] = instruction, tuple(found)
    return Limits(threads, rates, instructions, "native")


def _torch_limits(threads: int, repeats: int, device: torch.device) -> Limits:
    """Limits as PyTorch reaches them: a sum (on a GPU a copy) measures reading, matrix products measure arithmetic."""
    cpu = device.type == "cpu"
    kinds = {"fp32": torch.float32} if cpu else {"fp32": torch.float32, "bf16": torch.bfloat16}
    free, side = available_memory() if cpu else devices.memory_room(str(device))[1], 512 if cpu else 8192
    memory = torch.ones(min((1 if cpu else 2) * BYTES, free // 8) // 4, device=device)
    read = memory.sum if cpu else partial(torch.empty_like(memory).copy_, memory)
    timed = repeats, device, 1 if cpu else COPIES
    rates = {"read": _rates(read, memory.nbytes * (1.0 if cpu else 2.0), *timed)}
    del memory, read
    for kind, dtype in kinds.items():
        a = torch.randn(side, side, device=device).to(dtype)
        rates[kind] = _rates(partial(torch.matmul, a, a), 2.0 * side**3, *timed)
    return Limits(threads, rates, dict.fromkeys(kinds, "PyTorch's matrix product"), "torch")


def _rates(job: Callable[[], object], work: float, repeats: int, device: torch.device, calls: int) -> tuple[float, ...]:
    """`work` per second of each repetition of `calls` calls: many on a GPU, where one is mostly launch and wait."""

    def run() -> None:
        for _ in range(calls):
            job()
        devices.wait(device)

    run()
    return tuple(calls * work / seconds for seconds in timeit.repeat(run, number=1, repeat=repeats))
