"""Environment variables of several vLLMs on one machine, so that none takes another's cores or GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sameseed.errors import ConfigError
from sameseed_vllm.cores import cores_of_replicas
from sameseed_vllm.draft import Spread
from sameseed_vllm.flags import BIND, Installed, environment

GPUS = "CUDA_VISIBLE_DEVICES"  # vLLM's builds for AMD GPUs read it too


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
