"""The drafting levels that a SpecConfig names, and checks of them. Nothing here reads weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from sameseed import ops, registry
from sameseed.config import MODEL, SpecConfig
from sameseed.errors import ConfigError
from sameseed.models.config import is_parallel
from sameseed.models.head_config import is_block, is_head
from sameseed.models.loader import resolve_model
from sameseed.scheme import QuantScheme
from sameseed.spec.drafter import Drafter, NoDrafter, goes_ahead, parse_options

NESTED = "nested"  # draft format: the lower weights inside the target's own


def check_options(spec: SpecConfig) -> None:
    """Raise ConfigError or RegistryError for a level with a bad option or format, or a wrong number of levels below."""
    for level in levels(with_heads(spec)):
        parse_options(drafter_class(level), level.options)
        if level.format != NESTED:
            QuantScheme.parse(level.format)
        check_below(drafter_class(level), level)


def check_overlap(spec: SpecConfig) -> None:
    """Raise ConfigError if `overlap` is set and the drafter cannot draft ahead, or no core is left for the target."""
    if not spec.overlap and not any(level.overlap for level in levels(spec)):
        return
    cls, cores = drafter_class(spec), ops.available_cores()
    if goes_ahead(cls) and may_branch(spec):
        others = {n: {k: v for k, v in spec.options.items() if k != n} for n in spec.options}
        making = [n for n, rest in others.items() if not may_branch(replace(spec, options=rest))]
        raise ConfigError(
            f"--overlap {spec.overlap}: which path of a tree is right is not known beforehand; leave out overlap, or "
            f"what makes trees of drafter {spec.method!r}: {', '.join(making) or 'take another'}"
        )
    if not goes_ahead(cls) or any(b.overlap for level in spec.below for b in levels(level)):
        able = [n for n, module in registry.loaded("drafters").items() if goes_ahead(module.DRAFTER)]
        raise ConfigError(
            f"--overlap {spec.overlap}: drafter {spec.method!r} cannot draft ahead while the target verifies; "
            f"{' and '.join(able)} can, as the only level"
        )
    if spec.overlap >= cores:
        raise ConfigError(f"--overlap {spec.overlap} would leave the target none of {cores} core(s); give it fewer")


def check_policies(spec: SpecConfig) -> None:
    """Raise ConfigError for a level's policy that would never learn, or a confidence that would have no effect."""
    for level in levels(with_heads(spec)):
        own = [] if drafter_class(level).owns else [b for b in level.below if b.policy != "fixed"]
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
    """Can this drafter, or any that it asks in turn, end drafts by probability? Raises as `with_heads`."""
    spec = with_heads(spec)
    cls = drafter_class(spec)
    return cls.judges or (not cls.owns and any(heeds_confidence(b) for b in spec.below))


def can_overlap(spec: SpecConfig) -> bool:
    """Can this drafter draft ahead while the target verifies (`overlap`)? Raises as `with_heads`."""
    spec = with_heads(spec)
    return goes_ahead(drafter_class(spec)) and not may_branch(spec)


def may_branch(spec: SpecConfig) -> bool:
    """May drafts be trees, its own or those of drafters that it asks in turn? Raises ConfigError for bad options."""
    cls = drafter_class(spec)
    asked = () if cls.owns else spec.below
    return cls.branches_with(parse_options(cls, spec.options)) or any(map(may_branch, asked))


def check_below(cls: type[Drafter], spec: SpecConfig) -> None:
    """Raise ConfigError if there are too few or too many drafters below a drafter of this class."""
    least, most = cls.num_below
    wanted = f"{least} drafter(s)" if least == most else "two drafters or more" if least == 2 else f"up to {most}"
    if not least <= len(spec.below) <= most:
        first = spec.below[0].method if spec.below else ""
        fitting = f"'{first} + {spec.method}'" if most == 0 else "'ngram > MODEL'" if most == 1 else "'suffix + MODEL'"
        raise ConfigError(
            f"drafter {spec.method!r} works with {wanted} below it, not {len(spec.below)}; write e.g. --draft {fitting}"
        )


def levels(spec: SpecConfig) -> Iterator[SpecConfig]:
    """A level and the levels below it, in the order in which their models are built."""
    if spec.method == "none":
        return
    yield spec
    for below in spec.below:
        yield from levels(below)


def drafter_class(spec: SpecConfig) -> type[Drafter]:
    """The class of a level's drafter. Raises RegistryError for an unknown name."""
    if spec.method == "none":
        return NoDrafter
    if spec.drafter is not None:
        own: type[Drafter] = spec.drafter if isinstance(spec.drafter, type) else type(spec.drafter)
        return own
    found: type[Drafter] = registry.load("drafters", spec.method).DRAFTER
    return found


def with_heads(spec: SpecConfig) -> SpecConfig:
    """The same levels, with the fitting drafter for each model that is a draft head or a parallel draft model.

    Raises ModelLoadError for a model that does not exist.
    """
    below = tuple(with_heads(b) for b in spec.below)
    if spec.model is not None and spec.method == MODEL:
        folder = resolve_model(str(spec.model))
        method = head_drafter(folder) if is_head(folder) else "parallel" if is_parallel(folder) else MODEL
        return replace(spec, method=method, below=below)
    return replace(spec, below=below)


def head_drafter(folder: Path) -> str:
    """The name of the drafter for the head in `folder`."""
    return "block" if is_block(folder) else "eagle"


def resolved_options(spec: SpecConfig) -> dict[str, object]:
    """All options of one level, defaults included. Raises ConfigError or RegistryError for bad ones."""
    return asdict(parse_options(drafter_class(spec), spec.options))
