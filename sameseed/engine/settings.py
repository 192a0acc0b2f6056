"""Settings: makes an EngineConfig from keyword arguments, as LLM and the command line take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from sameseed import fields
from sameseed.config import ENDING, GOODPUT_DRAFT_TOKENS, CacheConfig, EngineConfig, SpecConfig, parse_draft
from sameseed.errors import ConfigError
from sameseed.spec.drafter import Drafter

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Settings of the draft and of the cache, and the fields that they set.
OF_SPEC = {"draft_options": "options", "draft_format": "format"}
OF_SPEC |= {name: name for name in ("num_draft_tokens", "confidence", "policy", "overlap")}
OF_CACHE = {"kv_format": "format", **{name: name for name in ("block_size", "num_blocks", "prefix_cache")}}
DraftChoice = str | SpecConfig | Drafter | type[Drafter] | None


class Settings(TypedDict, total=False):
    """Keyword arguments of LLM, AsyncLLM and `make_config`: fields of EngineConfig, CacheConfig and SpecConfig."""

    num_draft_tokens: int | None
    confidence: float | None
    draft_options: dict[str, object] | None
    draft_format: str | None
    policy: str | None
    overlap: int | None
    max_num_rows: int
    max_num_seqs: int
    max_pass_ms: float
    max_model_len: int | None
    format: str
    backend: str
    device: str
    threads: int | None
    gpu_memory_utilization: float
    profile: str | None
    force_profile: bool
    template_date: str | None
    kv_format: str
    block_size: int
    num_blocks: int | None
    prefix_cache: bool


class AsyncEngineArgs(Settings, total=False):
    """All keyword arguments of AsyncLLM as a dict, for `AsyncLLM.from_engine_args`."""

    model: str | None
    draft: DraftChoice
    seed: int | None


def make_config(draft: DraftChoice = None, **settings: Unpack[Settings]) -> EngineConfig:
    """An EngineConfig from keyword arguments, as LLM and the CLI take them. Raises ConfigError for unknown settings.

    `draft`: None for plain decoding, text for `parse_draft`, or a drafter of the user: a class, or an object, which is
    used as it is. `policy` "auto" (the default unless `draft` is a SpecConfig) is goodput with at most 12 tokens; with
    a `confidence`, fixed lengths, which it ends early. `draft_options`: options of the top level; the key "below" holds
    a list with an object of SpecConfig fields for each level below.
    """
    fields.check_keys(settings, AsyncEngineArgs.__annotations__)  # errors may suggest `model` or `draft` too
    spec = _spec_of(draft)
    given: dict[str, Any] = {OF_SPEC[k]: v for k, v in settings.items() if k in OF_SPEC and v is not None}
    if given.get("policy") == "auto" or ("policy" not in given and not isinstance(draft, SpecConfig)):
        given["policy"] = "fixed" if "confidence" in given or spec.method == "none" else "goodput"
    if given.get("policy") in ENDING:
        given.setdefault("num_draft_tokens", GOODPUT_DRAFT_TOKENS)
    options = fields.value_of(Mapping[str, Any], given.pop("options", {}), "draft_options")
    below = _levels_below(spec, options.get("below"))
    if chosen := {k: v for k, v in options.items() if k != "below"}:
        given["options"] = {**spec.options, **chosen}
    spec = dataclasses.replace(spec, below=below, **given)
    spec = _in_format(spec, given.get("format", "auto"))
    cache: dict[str, Any] = {OF_CACHE[k]: v for k, v in settings.items() if k in OF_CACHE}
    rest: dict[str, Any] = {k: v for k, v in settings.items() if k not in OF_SPEC | OF_CACHE}
    return EngineConfig(spec=spec, cache=CacheConfig(**cache), **rest)


def _spec_of(draft: DraftChoice) -> SpecConfig:
    if isinstance(draft, SpecConfig):
        return draft
    if draft is None or draft == "none":
        return SpecConfig()
    if isinstance(draft, str):
        return parse_draft(draft)
    kind = draft if isinstance(draft, type) else type(draft)
    if not issubclass(kind, Drafter):
        raise ConfigError(f"draft must be text, a SpecConfig or a Drafter, got {draft!r}")
    return SpecConfig(kind.__name__, drafter=draft)


def _in_format(spec: SpecConfig, number_format: str) -> SpecConfig:
    """The same levels, with this format for the models of drafters in turn that have no format of their own."""
    if spec.model is not None:
        return dataclasses.replace(spec, format=number_format) if spec.format == "auto" else spec
    return dataclasses.replace(spec, below=tuple(_in_format(b, number_format) for b in spec.below))


def _levels_below(spec: SpecConfig, settings: object) -> tuple[SpecConfig, ...]:
    """The levels below a drafter, with settings from plain data: a list of objects, one per level, in order."""
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
        if isinstance(options := values.get("options"), dict):
            values = {**values, "options": {**level.options, **options}}
        made.append(dataclasses.replace(level, **{**values, "below": lower}))
    return tuple(made)
