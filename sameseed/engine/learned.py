"""What goodput learned, kept for the next process: what rounds cost here, and how often such drafts are right.

By a digest of all that both depend on: machine, weights, formats, drafters. How fast the machine is at the moment is
measured again, and requests soon outweigh what earlier ones showed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import sameseed
from sameseed import store
from sameseed.config import EngineConfig, SpecConfig
from sameseed.engine.scope import machine_here
from sameseed.lengths._cost import EngineCost
from sameseed.lengths.goodput import GoodputLength
from sameseed.scheme import QuantScheme

SCHEMA, KIND = 4, "learned"
FIRST, LAST = 64, 4096  # rounds after which a table is kept: then after four times as many, and each `LAST`


def learned_key(config: EngineConfig, models: list[tuple[Path, QuantScheme]]) -> str | None:
    """A digest of what rounds depend on; None: with a drafter that has no name. `models`: the target, then drafts."""
    plain = _without_models(config.spec)
    if plain is None:
        return None
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


def _without_models(spec: SpecConfig) -> SpecConfig | None:
    below = tuple(_without_models(b) for b in spec.below)
    if spec.drafter is not None or None in below:
        return None
    return replace(spec, model=None, below=tuple(b for b in below if b is not None))


class LearnedTable:
    """Where one engine's policy begins, and where it keeps what it learns. Without a key nothing is kept."""

    def __init__(self, policy: GoodputLength, key: str) -> None:
        self._policy, self._key = policy, key
        self._rounds, self._next = 0, FIRST

    def begin(self, measure: Callable[[EngineCost | None], EngineCost]) -> None:
        """Take over what was kept, or measure; `measure(cost)` brings a known cost to the machine's speed now."""
        arrays = store.read(KIND, self._key)
        known: EngineCost | None = None
        if arrays is not None:
            try:
                known = EngineCost.from_arrays(arrays)
                self._policy.acceptance.restore(arrays)
            except (KeyError, ValueError, IndexError) as error:
                store.refuse(KIND, self._key, error)
        self._policy.calibrate(lambda: measure(known))

    def passed(self) -> None:
        """A round has passed."""
        self._rounds += 1
        if self._rounds >= self._next and self._policy.cost is not None:
            self._next = self._rounds + min(3 * self._rounds, LAST)
            store.write(KIND, self._key, {**self._policy.cost.as_arrays(), **self._policy.acceptance.as_arrays()})
