"""The drafting levels that a SpecConfig names, each with its drafter's class and options. No weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from sameseed import fields, ops, registry
from sameseed.config import SpecConfig, draft_text
from sameseed.errors import ConfigError
from sameseed.models.config import model_text
from sameseed.models.head_config import is_block, is_head
from sameseed.models.loader import resolve_model
from sameseed.scheme import QuantScheme
from sameseed.spec.drafter import Drafter, NoDrafter, goes_ahead

NESTED = "nested"  # draft format: the lower weights inside the target's own


@dataclass(frozen=True)
class Level:
    """A drafting level: its settings, the class and options of its drafter, and the levels below it."""

    spec: SpecConfig
    cls: type[Drafter]
    options: Drafter.Options
    below: tuple[Level, ...]

    @classmethod
    def of(cls, spec: SpecConfig) -> Level:
        """The level of a spec whose drafters are known (`resolve`). Raises ConfigError or RegistryError."""
        if spec.method == "none":
            return cls(spec, NoDrafter, NoDrafter.Options(), ())
        drafter = drafter_class(spec)
        options = fields.parse(drafter.Options, spec.options)
        if spec.format != NESTED:
            QuantScheme.parse(spec.format)
        least, most = drafter.num_below
        if not least <= len(spec.below) <= most:
            below = [b.method for b in spec.below]
            wanted = str(least) if least == most else f"{least} or more" if least == 2 else f"up to {most}"
            usual = {1: "ngram > MODEL"}.get(most, "suffix + MODEL")
            if not most:
                usual = draft_text(SpecConfig("first", below=(spec.below[0], replace(spec, below=()))), models=True)
            raise ConfigError(
                f"drafter {spec.method!r} needs {wanted} drafters below it, not {len(below)}; e.g. --draft '{usual}'"
            )
        return cls(spec, drafter, options, tuple(map(cls.of, spec.below)))

    def every(self) -> Iterator[Level]:
        """This level and those below it, in the order in which their models are built; none for plain decoding."""
        if self.cls is not NoDrafter:
            yield self
            for below in self.below:
                yield from below.every()

    @property
    def in_turn(self) -> tuple[Level, ...]:
        """The levels below that draft for the same target: a drafter without a model asks them in turn."""
        return () if self.cls.owns else self.below

    @property
    def heeds_confidence(self) -> bool:
        """Can this drafter, or any that it asks in turn, end drafts by probability?"""
        return self.cls.judges or any(b.heeds_confidence for b in self.in_turn)

    @property
    def branches(self) -> bool:
        """May drafts be trees, its own or those of drafters that it asks in turn?"""
        return self.cls.branches_with(self.options) or any(b.branches for b in self.in_turn)

    @property
    def can_overlap(self) -> bool:
        """Can this drafter draft ahead while the target verifies (`overlap`)?"""
        return goes_ahead(self.cls) and not self.branches

    def check(self) -> None:
        """Raise ConfigError for settings without effect: an overlap, a policy that never learns, a confidence."""
        if self.spec.overlap or any(level.spec.overlap for level in self.every()):
            self._check_overlap()
        for level in self.every():
            learning = [b.spec for b in level.in_turn if b.spec.policy != "fixed"]
            if learning:
                raise ConfigError(
                    f"drafter {level.spec.method!r} asks {learning[0].method!r} in turn; put --policy on the whole"
                )
            if level.spec.confidence is not None and level.spec.policy != "disco" and not level.heeds_confidence:
                raise ConfigError(
                    f"--confidence {level.spec.confidence:g}: drafter {level.spec.method!r} has no probabilities to "
                    "end a draft by; leave it out, or give it to a model below: "
                    '--draft-options \'{"below": [{"confidence": 0.4}]}\''
                )

    def _check_overlap(self) -> None:
        """Raise ConfigError if the drafter cannot draft ahead, or no core is left for the target."""
        spec, cores, able = self.spec, ops.available_cores(), goes_ahead(self.cls)
        if able and self.branches:
            raise ConfigError(f"--overlap {spec.overlap} needs chains as drafts; leave it out, or siblings")
        if not able or any(level.spec.overlap for b in self.below for level in b.every()):
            names = [n for n, module in registry.loaded("drafters").items() if goes_ahead(module.DRAFTER)]
            raise ConfigError(
                f"--overlap {spec.overlap}: {spec.method!r} cannot draft ahead; {' and '.join(names)} can, on its own"
            )
        if spec.overlap >= cores:
            raise ConfigError(f"--overlap {spec.overlap} would leave the target none of {cores} core(s); give it fewer")


def resolve(spec: SpecConfig) -> Level:
    """The levels that a spec names, with the drafter of each head or parallel model. Raises as `Level.of`."""

    def recognized(spec: SpecConfig) -> SpecConfig:
        if spec.model is None or spec.method != "draft_model":
            return spec
        return replace(spec, method=drafter_for(resolve_model(str(spec.model))))

    return Level.of(spec.with_each(recognized))


def drafter_for(folder: Path) -> str:
    """The name of the drafter for the head or the draft model in `folder`."""
    if is_head(folder):
        return "block" if is_block(folder) else "eagle"
    return model_text(folder)


def drafter_class(spec: SpecConfig) -> type[Drafter]:
    """The class of a level's drafter. Raises RegistryError for an unknown name."""
    if spec.method == "none":
        return NoDrafter
    chosen: Any = registry.load("drafters", spec.method).DRAFTER if spec.drafter is None else spec.drafter
    return cast(type[Drafter], chosen if isinstance(chosen, type) else type(chosen))
