"""Stores what goodput learned for the next process: costs of rounds on this machine, and acceptance counts.

The first rounds of the next process scale the costs to the machine's current speed, and its requests soon outweigh the
stored counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import sameseed
from sameseed import devices, store
from sameseed.config import EngineConfig
from sameseed.cost.running import EngineCost
from sameseed.engine.levels import Level
from sameseed.lengths.goodput import GoodputLength
from sameseed.scheme import QuantScheme
from sameseed.tuned import TunedMachine

SCHEMA, KIND = 5, "learned"
LONGEST, MOST = 600.0, 1e18  # seconds of a pass (the server ends an engine whose step takes as long), any other number
FIRST, LAST = 64, 4096  # rounds before the first write; later writes at 4 times as many, at most `LAST` apart


def machine_here(device: str = "cpu") -> TunedMachine:
    """This machine, as a profile describes the one that it was tuned on. For a GPU, CPU and threads are left empty."""
    if (gpu := devices.title(device)) is not None:
        return TunedMachine("", 0, gpu=gpu)
    return TunedMachine(devices.cpu_name(), devices.native_threads(), devices.native_isa() or "")


def learned_key(config: EngineConfig, models: list[tuple[Path, QuantScheme]]) -> str | None:
    """A digest of all that rounds depend on, None for a user's own drafter; `models`: target, then drafts."""
    if any(level.spec.drafter is not None for level in Level.of(config.spec).every()):
        return None
    plain = config.spec.with_each(lambda spec: replace(spec, model=None))
    return store.digest(
        {
            "schema": SCHEMA,
            "version": sameseed.__version__,
            "machine": asdict(machine_here(config.device)),
            "models": [(store.weights_key(folder), str(quant)) for folder, quant in models],
            "kv_format": config.cache.format,
            "backend": config.backend,
            "spec": asdict(plain),
        }
    )


class LearnedTable:
    """The stored state of one engine's policy: what the policy starts from, and where it stores what it learns."""

    def __init__(self, policy: GoodputLength, key: str) -> None:
        self._policy, self._key = policy, key
        self._rounds, self._next = 0, FIRST

    def begin(self, measure: Callable[[], EngineCost]) -> None:
        """Take over the stored state, whose costs are not measured again, or measure and store that at once."""
        arrays = store.read(KIND, self._key, lambda found: is_plausible(found, self._policy.acceptance.as_arrays()))
        if arrays is None:
            self._policy.calibrate(measure)
            self._write()
        else:
            self._policy.acceptance.restore(arrays)
            self._policy.calibrate(lambda: EngineCost.from_arrays(arrays))

    def passed(self) -> None:
        """Count a round, and write the state if it is time."""
        self._rounds += 1
        if self._rounds >= self._next:
            self._next = self._rounds + min(3 * self._rounds, LAST)
            self._write()

    def _write(self) -> None:
        if self._policy.cost is not None:
            store.write(KIND, self._key, {**self._policy.cost.as_arrays(), **self._policy.acceptance.as_arrays()})


def is_plausible(arrays: store.Arrays, own: store.Arrays) -> bool:
    """Whether arrays are of a policy with counts like `own`, and a pass takes 1 µs to 10 minutes: clocks may glitch."""
    EngineCost.from_arrays(arrays)  # raises where they do not fit
    most, seconds = max(a.max() for a in arrays.values()), arrays["target"][1]
    return bool(most <= MOST and seconds.min() >= 1e-6 and seconds.max() <= LONGEST and store.alike(arrays, own))
