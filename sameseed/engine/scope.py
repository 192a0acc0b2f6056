"""Checks that a tuned profile fits this machine and these weights; goodput decides outside its scope."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from sameseed import devices, store
from sameseed.config import EngineConfig
from sameseed.errors import ConfigError
from sameseed.tuned import Tuned, TunedMachine

log = logging.getLogger("sameseed")


def machine_here(device: str = "cpu") -> TunedMachine:
    """This machine, as a profile describes the one that it was tuned on. For a GPU, CPU and threads are left empty."""
    if (gpu := devices.title(device)) is not None:
        return TunedMachine("", 0, gpu=gpu)
    return TunedMachine(devices.cpu_name(), devices.native_threads(), devices.native_isa() or "")


def heed_profile(config: EngineConfig, folder: Path) -> EngineConfig:
    """The settings, checked against their profile if they have one.

    If `max_num_seqs` is above the batch sizes that were tuned, goodput decides the draft lengths. Raises ConfigError
    for a profile of another machine or of other weights, unless `force_profile` is set.
    """
    if config.profile is None:
        return config
    tuned = Tuned.read(config.profile)
    why = tuned.machine.differs(machine_here(config.device))
    if why is None and tuned.model.digest not in ("", found := store.weights_key(folder)):
        why = f"weights {tuned.model.digest} there, {found} here"
    if why is not None and not config.force_profile:
        raise ConfigError(
            f"profile {config.profile} was tuned for something else ({why}): what it chose may be slower than plain "
            "decoding here; run `sameseed tune` again, or give --force-profile"
        )
    if why is not None:
        log.warning("profile %s was tuned for something else (%s); it is used all the same", config.profile, why)
    beyond = tuned.scope.beyond(config.max_num_seqs)
    if beyond is None or config.spec.policy == "goodput":
        return config
    log.warning("profile %s: %s; goodput decides how much is drafted", config.profile, beyond)
    return replace(config, spec=replace(config.spec, policy="goodput"))
