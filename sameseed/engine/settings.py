"""Settings: from keyword arguments, as LLM and the command line take them, to an EngineConfig."""

from __future__ import annotations

import dataclasses
from typing import Any

from sameseed.config import GOODPUT_DRAFT_TOKENS, CacheConfig, EngineConfig, SpecConfig, parse_draft
from sameseed.errors import ConfigError
from sameseed.spec.drafter import Drafter


def make_config(
    draft: str | SpecConfig | Drafter | type[Drafter] | None = None,
    *,
    num_draft_tokens: int | None = None,
    confidence: float | None = None,
    draft_options: dict[str, object] | None = None,
    draft_format: str | None = None,
    policy: str | None = None,
    overlap: int | None = None,
    **settings: Any,
) -> EngineConfig:
    """An EngineConfig from keyword arguments, as LLM and the CLI take them.

    `draft`: None for plain decoding, text as `parse_draft` reads it ("ngram", a model, "suffix + embedded-draft"), or a
    drafter of one's own: its class, or an object, which is taken as it is. `policy` "auto" (the default, unless `draft`
    is a SpecConfig) is goodput with at most 12 tokens, which never asks for drafts that do not pay; or fixed lengths,
    where a `confidence` is to end them. `draft_options` are those of its top level; under "below" a list has those of
    the levels below, each an object with fields of SpecConfig. `settings` are fields of EngineConfig and CacheConfig
    (`block_size`, `num_blocks`, `kv_format`, `prefix_cache`). Raises ConfigError for unknown settings.
    """
    spec = _spec_of(draft)
    if policy == "auto" or (policy is None and not isinstance(draft, SpecConfig)):
        policy = "fixed" if confidence is not None or spec.method == "none" else "goodput"
    if num_draft_tokens is None and policy == "goodput":
        num_draft_tokens = GOODPUT_DRAFT_TOKENS
    changes: dict[str, Any] = {
        "num_draft_tokens": num_draft_tokens,
        "confidence": confidence,
        "options": draft_options,
        "format": draft_format,
        "policy": policy,
        "overlap": overlap,
    }
    below = _levels_below(spec, (draft_options or {}).get("below"))
    changes["options"] = {k: v for k, v in (draft_options or {}).items() if k != "below"} or None
    spec = dataclasses.replace(spec, below=below, **{k: v for k, v in changes.items() if v is not None})
    if draft_format is not None and spec.model is None:  # drafters in turn: the format is that of their models
        spec = _in_format(spec, draft_format)
    cache_names = {"kv_format": "format", **{k: k for k in ("block_size", "num_blocks", "prefix_cache")}}
    cache = {cache_names[k]: settings.pop(k) for k in list(settings) if k in cache_names}
    known = {f.name for f in dataclasses.fields(EngineConfig)} - {"cache", "spec"}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r} (there are: {', '.join(sorted(known | set(cache_names)))})")
    return EngineConfig(spec=spec, cache=CacheConfig(**cache), **settings)


def _spec_of(draft: str | SpecConfig | Drafter | type[Drafter] | None) -> SpecConfig:
    if isinstance(draft, SpecConfig):
        return draft
    if draft is None or draft == "none":
        return SpecConfig()
    return parse_draft(draft) if isinstance(draft, str) else SpecConfig(_name(draft), drafter=draft)


def _in_format(spec: SpecConfig, number_format: str) -> SpecConfig:
    """The same levels, where models below are in this format, unless they have one of their own."""
    below = tuple(
        dataclasses.replace(b, format=number_format)
        if b.model is not None and b.format == "auto"
        else _in_format(b, number_format)
        for b in spec.below
    )
    return dataclasses.replace(spec, below=below)


def _name(draft: object) -> str:
    """The name of a drafter that is given as an object. Raises ConfigError for what is none."""
    kind = draft if isinstance(draft, type) else type(draft)
    if not issubclass(kind, Drafter):
        raise ConfigError(f"draft must be text, a SpecConfig or a Drafter, got {draft!r}")
    return kind.__name__


def _levels_below(spec: SpecConfig, settings: object) -> tuple[SpecConfig, ...]:
    """The levels below a drafter with settings from plain data: a list of objects, one for each, in their order."""
    if settings is None:
        return spec.below
    if not isinstance(settings, list) or len(settings) != len(spec.below):
        raise ConfigError(f"option 'below' must list {len(spec.below)} objects, one for each drafter below")
    made = []
    known = {f.name for f in dataclasses.fields(SpecConfig)} - {"method", "model", "drafter"}
    for level, values in zip(spec.below, settings, strict=True):
        if not isinstance(values, dict) or values.keys() - known:
            raise ConfigError(f"option 'below': {values!r} must be an object with some of {', '.join(sorted(known))}")
        lower = _levels_below(level, values.get("below"))
        made.append(dataclasses.replace(level, **{**values, "below": lower}))
    return tuple(made)
