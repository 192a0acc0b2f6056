"""Where vLLM runs: which one an interpreter has, and the cores and GPUs of its workers and replicas.

By itself vLLM gives each worker a NUMA node, and refuses more workers than nodes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError
from sameseed_vllm.draft import Spread
from sameseed_vllm.flags import Installed

BIND = "VLLM_CPU_OMP_THREADS_BIND"
LOOK = Path(__file__).with_name("look.py")
PATIENCE = 120.0  # seconds for an interpreter to start, on a busy machine
_GET = "install it: pip install vllm, or name the python of an environment that has it with --vllm-python"


def interpreter(python: str | None) -> str:
    """The interpreter that has vLLM: `python`, or this one. Raises ConfigError if it is no program, or has no vLLM."""
    if python is None and importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"--engine vllm needs vLLM; {_GET}")
    program = sys.executable if python is None else shutil.which(python)
    if program is None:
        raise ConfigError(f"--vllm-python {python} is no program; give the python of an environment that has vLLM")
    return program


def look(python: str | None) -> Installed:
    """The vLLM that an interpreter has. Raises ConfigError if it has none."""
    program = interpreter(python)
    command = [program, str(LOOK), "arctic_inference", "ray"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise ConfigError(f"{program} does not run Python programs ({said[-1][:200]}); {_GET}") from None
    if told is None:
        raise ConfigError(f"{program} has no vLLM; {_GET}")
    return Installed(told["version"], told["cpu"], frozenset(told["flags"]), frozenset(told["modules"]))


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


GPUS = "CUDA_VISIBLE_DEVICES"  # vLLM's builds for AMD GPUs read it too


def environment(
    settings: Mapping[str, Any], spread: Spread | None = None, batch_invariant: bool = False
) -> dict[str, str]:
    """Environment variables for what has no flag. On CPUs each worker gets cores of its own; GPU builds ignore that."""
    made = {"VLLM_BATCH_INVARIANT": "1"} if batch_invariant else {}
    threads = settings.get("threads")
    if threads is not None:
        return {**made, "OMP_NUM_THREADS": str(threads), BIND: "nobind"}
    spread = spread or Spread()
    cores = cores_of_workers(spread.workers) if spread.nodes == 1 and BIND not in os.environ else None
    return made if cores is None else {**made, BIND: cores}


def environments(
    settings: Mapping[str, Any], spread: Spread, installed: Installed, replicas: int = 1, batch_invariant: bool = False
) -> list[dict[str, str]]:
    """Environment variables of each replica. GPUs are assigned in order: CUDA_VISIBLE_DEVICES, else from 0 on.

    Raises ConfigError if so many replicas are not possible.
    """
    if replicas < 1:
        raise ConfigError(f"--replicas must be at least 1, got {replicas}")
    made = environment(settings, spread, batch_invariant)
    if replicas == 1:
        return [made]
    if spread.nodes > 1:
        raise ConfigError(
            "--replicas are processes on this machine, and --nodes spreads one over several; start one server a node "
            "instead, with a router in front"
        )
    if not installed.cpu:
        return [{**made, GPUS: own} for own in _gpus(replicas, spread.workers)]
    if settings.get("threads") is not None or BIND in os.environ:
        return [made] * replicas
    return [{**made, BIND: cores} for cores in cores_of_replicas(replicas, spread.workers)]


def _gpus(replicas: int, workers: int) -> list[str]:
    given = os.environ.get(GPUS)
    names = list(map(str, range(replicas * workers))) if given is None else [n for n in given.split(",") if n]
    if len(names) < replicas * workers:
        raise ConfigError(
            f"{replicas} replicas of {workers} GPUs need {replicas * workers}, and {GPUS} has {len(names)}; name more "
            "there, or take fewer --replicas"
        )
    return [",".join(names[workers * i : workers * (i + 1)]) for i in range(replicas)]
