"""Cores for vLLM's workers on a CPU: by itself it gives each a NUMA node, and refuses more workers than nodes."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


def cores_of_workers(workers: int, allowed: set[int] | None = None, system: Path = SYSTEM) -> str | None:
    """What VLLM_CPU_OMP_THREADS_BIND should say, e.g. "0-3|4-7"; None where vLLM binds them well by itself.

    `allowed`: CPUs that may be used, by default those of this process. With fewer CPUs than workers, some share one.
    """
    allowed = set(os.sched_getaffinity(0)) if allowed is None else allowed
    if workers <= max(1, _num_nodes(allowed, system)):
        return None
    cpus = sorted(_one_a_core(allowed, system).values())
    cpus = cpus if len(cpus) >= workers else sorted(allowed)
    shares = [cpus[len(cpus) * i // workers : len(cpus) * (i + 1) // workers] for i in range(workers)]
    return "|".join(",".join(map(str, share or [cpus[i % len(cpus)]])) for i, share in enumerate(shares))


def _num_nodes(allowed: set[int], system: Path) -> int:
    """NUMA nodes with a CPU that may be used."""
    own = [{int(cpu.name[3:]) for cpu in node.glob("cpu[0-9]*")} for node in system.glob("node/node[0-9]*")]
    return sum(bool(cpus & allowed) for cpus in own)


def _one_a_core(allowed: set[int], system: Path) -> dict[tuple[str, str], int]:
    """One CPU of each physical core: two hyper-threads gain nothing where both compute."""
    found = {}
    for cpu in sorted(allowed):
        topology = system / f"cpu/cpu{cpu}/topology"
        try:
            core = (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
        except OSError:  # not told: a core of its own
            core = ("", str(cpu))
        found[core] = cpu
    return found
