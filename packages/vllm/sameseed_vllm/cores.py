"""CPU cores for vLLM's workers. By itself vLLM gives each worker a NUMA node, and refuses more workers than nodes."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


def cores_of_workers(workers: int, allowed: set[int] | None = None, system: Path = SYSTEM) -> str | None:
    """The value of VLLM_CPU_OMP_THREADS_BIND, e.g. "0,1|2,3"; None if vLLM binds the workers well by itself.

    `allowed`: CPUs that may be used, by default those of this process. With fewer CPUs than workers, some share one.
    """
    allowed = set(os.sched_getaffinity(0)) if allowed is None else allowed
    if workers <= max(1, len(set(_nodes(allowed, system).values()))):
        return None
    return "|".join(_shares(workers, allowed, system))


def cores_of_replicas(replicas: int, workers: int, allowed: set[int] | None = None, system: Path = SYSTEM) -> list[str]:
    """The same for each of several vLLMs on one machine, which would all take the same cores by themselves."""
    allowed = set(os.sched_getaffinity(0)) if allowed is None else allowed
    shares = _shares(replicas * workers, allowed, system)
    return ["|".join(shares[workers * i : workers * (i + 1)]) for i in range(replicas)]


def _shares(num: int, allowed: set[int], system: Path) -> list[str]:
    """`num` parts of the CPUs, e.g. "0,1"; CPUs of one NUMA node stay together."""
    nodes = _nodes(allowed, system)

    def order(cpu: int) -> tuple[int, int]:
        return nodes.get(cpu, -1), cpu

    cpus = sorted(_one_a_core(allowed, system).values(), key=order)
    cpus = cpus if len(cpus) >= num else sorted(allowed, key=order)
    shares = [cpus[len(cpus) * i // num : len(cpus) * (i + 1) // num] for i in range(num)]
    return [",".join(map(str, share or [cpus[i % len(cpus)]])) for i, share in enumerate(shares)]


def _nodes(allowed: set[int], system: Path) -> dict[int, int]:
    """The NUMA node of each CPU that may be used, if the system reports it."""
    found = system.glob("node/node[0-9]*/cpu[0-9]*")
    return {cpu: int(path.parent.name[4:]) for path in found if (cpu := int(path.name[3:])) in allowed}


def _one_a_core(allowed: set[int], system: Path) -> dict[tuple[str, str], int]:
    """One CPU of each physical core: a second hyper-thread gains nothing if both compute."""
    found = {}
    for cpu in sorted(allowed):
        topology = system / f"cpu/cpu{cpu}/topology"
        try:
            core = (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
        except OSError:  # not reported: a core of its own
            core = ("", str(cpu))
        found[core] = cpu
    return found
