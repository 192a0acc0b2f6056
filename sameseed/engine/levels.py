"""The levels of drafting that a SpecConfig names, and what is wrong with them: nothing here reads a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from sameseed import ops, registry
from sameseed.config import SpecConfig
from sameseed.errors import ConfigError
from sameseed.models.eagle_config import is_head
from sameseed.models.loader import resolve_model
from sameseed.scheme import QuantScheme
from sameseed.spec.drafter import Drafter, NoDrafter, parse_options

NESTED = "nested"  # draft format: the lower weights inside the target's own


def check_options(spec: SpecConfig) -> None:
    """Raise ConfigError or RegistryError: a level with a bad option or format, or too few below it; nothing is read."""
    for level in levels(with_heads(spec)):
        parse_options(drafter_class(level), level.options)
        if level.format != NESTED:
            QuantScheme.parse(level.format)
        check_below(drafter_class(level), level)


def check_overlap(spec: SpecConfig) -> None:
    """Raise ConfigError where a drafter is to go ahead of its target and cannot, or where no thread is left for it."""
    if not spec.overlap and not any(level.overlap for level in levels(spec)):
        return
    cls, cores = drafter_class(spec), ops.available_cores()
    if not cls.goes_ahead or any(b.overlap for level in spec.below for b in levels(level)):
        able = [n for n in registry.names("drafters") if registry.load("drafters", n).DRAFTER.goes_ahead]
        raise ConfigError(
            f"--overlap {spec.overlap}: drafter {spec.method!r} cannot guess on while the target checks; "
            f"{' and '.join(able)} can, as the only level"
        )
    if spec.overlap >= cores:
        raise ConfigError(f"--overlap {spec.overlap} would leave the target none of {cores} core(s); give it fewer")


def check_policies(spec: SpecConfig) -> None:
    """Raise ConfigError for a policy below `first`, which would never learn, or a confidence that nobody would heed."""
    for level in levels(with_heads(spec)):
        own = [b for b in level.below if b.policy != "fixed"] if drafter_class(level).num_below < 0 else []
        if own:
            raise ConfigError(
                f"drafter {level.method!r} asks {own[0].method!r} below it in turn, which can have no policy "
                f"{own[0].policy!r} of its own; put --policy on the whole"
            )
        if level.confidence is not None and not heeds_confidence(level):
            raise ConfigError(
                f"--confidence {level.confidence:g}: drafter {level.method!r} has no probabilities to end a draft by; "
                'leave it out, or give it to a model below: --draft-options \'{"below": [{"confidence": 0.4}]}\''
            )


def heeds_confidence(spec: SpecConfig) -> bool:
    """Does this draft, or any that it asks in turn, end by its own probabilities? Raises as `with_heads`."""
    spec = with_heads(spec)
    cls = drafter_class(spec)
    return cls.judges or (cls.num_below < 0 and any(heeds_confidence(b) for b in spec.below))


def goes_ahead(spec: SpecConfig) -> bool:
    """Can this draft guess on while the target checks (`overlap`)? Raises as `with_heads`."""
    return drafter_class(with_heads(spec)).goes_ahead


def check_below(cls: type[Drafter], spec: SpecConfig) -> None:
    """Raise ConfigError for too few or too many drafters below one of this class."""
    wanted = "two drafters or more" if cls.num_below < 0 else f"{cls.num_below} drafter(s)"
    if len(spec.below) < 2 if cls.num_below < 0 else len(spec.below) != cls.num_below:
        raise ConfigError(
            f"drafter {spec.method!r} works with {wanted} below it, not {len(spec.below)}; write e.g. "
            "--draft 'suffix + embedded-draft' or --draft 'ngram > embedded-draft'"
        )


def levels(spec: SpecConfig) -> Iterator[SpecConfig]:
    """A level and those below it, in the order in which their models are built."""
    if spec.method == "none":
        return
    yield spec
    for below in spec.below:
        yield from levels(below)


def drafter_class(spec: SpecConfig) -> type[Drafter]:
    """The class of a level's drafter. Raises RegistryError for an unknown name."""
    if spec.method == "none":
        return NoDrafter
    found: type[Drafter] = registry.load("drafters", spec.method).DRAFTER
    return found


def with_heads(spec: SpecConfig) -> SpecConfig:
    """The same levels, where a model that turns out to be a draft head is drafted with as one.

    Raises ModelLoadError for a model that is not there.
    """
    below = tuple(with_heads(b) for b in spec.below)
    head = spec.method == "draft_model" and spec.model is not None and is_head(resolve_model(spec.model))
    return replace(spec, method="eagle" if head else spec.method, below=below)


def resolved_options(spec: SpecConfig) -> dict[str, object]:
    """All options of one level, defaults included. Raises ConfigError or RegistryError for bad ones."""
    return asdict(parse_options(drafter_class(spec), spec.options))
