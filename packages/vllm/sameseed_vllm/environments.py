"""Where vLLM runs: which one an interpreter has, and the cores of its workers."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence as Seq
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


Cpu = tuple[int, int, int]  # its NUMA node, its physical core, its number


def topology() -> list[Cpu]:
    """All CPUs in the order of their nodes and cores, by `lscpu`, which vLLM itself asks; none without it."""
    command = ["lscpu", "-p=NODE,CORE,CPU"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[int(value or 0) for value in line.split(",")] for line in lines if line and line[0] != "#"]
    return sorted((node, core, cpu) for node, core, cpu in rows)


def cores_of_workers(workers: int, allowed: set[int] | None = None, cpus: Seq[Cpu] | None = None) -> str | None:
    """The value of VLLM_CPU_OMP_THREADS_BIND, e.g. "0,1|2,3"; None if vLLM binds the workers well by itself.

    `allowed`: CPUs that may be used, by default those of this process. With fewer CPUs than workers, some share one.
    """
    allowed = set(os.sched_getaffinity(0)) if allowed is None else allowed
    known = [cpu for cpu in (topology() if cpus is None else cpus) if cpu[2] in allowed]
    if not known or workers <= len({node for node, *_ in known}):
        return None
    one_a_core = {core: cpu for _, core, cpu in known}  # a second hyper-thread gains nothing if both compute
    every = list(one_a_core.values()) if len(one_a_core) >= workers else [cpu for *_, cpu in known]
    shares = [every[len(every) * i // workers : len(every) * (i + 1) // workers] for i in range(workers)]
    return "|".join(",".join(map(str, share or [every[i % len(every)]])) for i, share in enumerate(shares))


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
