"""Settings of an engine as frozen dataclasses; flags, JSON keys and docs rows are derived from the fields."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sameseed import fields, registry
from sameseed.errors import ConfigError
from sameseed.fields import setting, within

MAX_DRAFT_TOKENS = 64
GOODPUT_DRAFT_TOKENS = 12  # the maximum for policies that end drafts themselves, unless another is given
ENDING = ("disco", "goodput")  # these policies
# `Drafter.owns` of the package's drafters. Loading one would import PyTorch, which the front of a server needs not.
OWNS = {
    **dict.fromkeys(("assistant", "cascade", "draft_model", "parallel"), "model"),
    **dict.fromkeys(("block", "eagle", "mtp"), "head"),
    **dict.fromkeys(("first", "ngram", "suffix"), ""),
    "self_quant": "target",
}


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. `format` "auto" is bf16 or fp16 if the weights (or the checkpoint's) are, else fp32."""

    block_size: int = within(16, 1, 1024, help="tokens in one block of the KV cache")
    num_blocks: int | None = within(None, 1, help="blocks of the KV cache; unset: what the longest requests need")
    format: str = setting("auto", "number format of the KV cache, or of keys/values (int8/bf16); auto: as the weights")
    prefix_cache: bool = setting(True, "texts of a tenant that begin alike share the KV cache of their beginning")

    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True)
class SpecConfig:
    """How to speculate. With the policy "disco", `confidence` is the probability that the whole draft is to keep."""

    method: str = "none"  # a drafter's name, or "none"
    model: str | None = None  # of a drafter that owns one
    format: str = setting("auto", "number format of the draft (self_quant: also nested); auto: the cheapest that pays")
    num_draft_tokens: int = within(
        4, 0, MAX_DRAFT_TOKENS, help="most draft tokens per round, 0..64; unset: 12 with goodput or disco, else 4"
    )
    confidence: float | None = within(None, 0, 1, help="end a draft after a token whose draft probability is lower")
    policy: str = setting(
        "fixed",
        "draft length: goodput (as many tokens as pay by measured times), fixed (always --k), history (by past "
        "drafts), disco (until likely wrong); auto: goodput, or fixed if --confidence is given",
    )
    options: Mapping[str, object] = field(default_factory=dict)  # the drafter's own Options
    below: tuple[SpecConfig, ...] = ()  # a cascade's drafters, or those that `first` asks in turn, with their settings
    overlap: int = within(
        0, 0, help="cores that draft ahead while the target checks on the others (pays only if cores would idle)"
    )
    drafter: Any = None  # the user's own `Drafter`, an object or a class; `method` is then only its name

    def __post_init__(self) -> None:
        fields.check(self)
        policies = registry.names("lengths")
        if self.policy not in policies:
            raise ConfigError(f"policy must be one of {', '.join(policies)}, got {self.policy!r}")
        if self.policy == "confidence" and self.confidence is None:
            raise ConfigError("policy 'confidence' needs a confidence, e.g. --confidence 0.4")

    def with_each(self, change: Callable[[SpecConfig], SpecConfig]) -> SpecConfig:
        """The same levels, each as `change` makes it (but for its `below`)."""
        return replace(change(self), below=tuple(b.with_each(change) for b in self.below))


def draft_text(spec: SpecConfig, models: bool = False) -> str:
    """The drafter without settings: "ngram", "ngram > cascade"; with `models`' names as `parse_draft` reads them."""
    below = [draft_text(b, models) for b in spec.below]
    if spec.method == "first":
        return " + ".join(f"({text})" if len(b.below) == 1 else text for b, text in zip(spec.below, below))
    return " > ".join([*below, spec.model if models and spec.model else spec.method])


def owns(method: str) -> str:
    """`Drafter.owns` of a drafter; one of the package is not loaded. Raises RegistryError for an unknown name."""
    return OWNS[method] if method in OWNS else str(registry.load("drafters", method).DRAFTER.owns)


def parse_draft(text: str) -> SpecConfig:
    """A SpecConfig from text: a drafter's name, a model (a folder, a hub id, "embedded-draft"), or `name:model`.

    `a + b`: drafter a first, and b if a has no draft. `a > m`: model m writes the draft, helped by drafter a. `+` binds
    tighter than `>`; brackets group. Raises ConfigError.
    """
    if text in registry.names("drafters") or os.path.exists(os.path.expanduser(text)):
        return _atom(text)
    tokens = [t.strip() for t in re.split(r"([()+>])", text) if t.strip()]
    spec, rest = _chain(tokens, text)
    if rest:
        raise ConfigError(f"--draft {text!r}: {rest[0]!r} has no place there; write e.g. 'suffix + embedded-draft'")
    return spec


def _chain(tokens: list[str], text: str) -> tuple[SpecConfig, list[str]]:
    """Parse `a > m > ...`: the SpecConfig, and the tokens that follow."""
    spec, tokens = _sum(tokens, text)
    while tokens and tokens[0] == ">":
        upper, tokens = _sum(tokens[1:], text)
        if upper.below:
            raise ConfigError(f"--draft {text!r}: right of '>' stands a model, not {upper.method!r}")
        method = "cascade" if upper.method == "draft_model" else upper.method
        spec = replace(upper, method=method, below=(spec,))
    return spec, tokens


def _sum(tokens: list[str], text: str) -> tuple[SpecConfig, list[str]]:
    """Parse `a + b + ...`: the SpecConfig, and the tokens that follow."""
    terms: list[SpecConfig] = []
    while not terms or (tokens and tokens[0] == "+"):
        tokens = tokens[1:] if terms else tokens
        if not tokens or tokens[0] in ")+>":
            raise ConfigError(f"--draft {text!r}: a drafter or a model is missing; write e.g. 'ngram > embedded-draft'")
        if tokens[0] == "(":
            spec, tokens = _chain(tokens[1:], text)
            if not tokens or tokens[0] != ")":
                raise ConfigError(f"--draft {text!r}: a bracket is not closed")
        else:
            spec = _atom(tokens[0])
        terms.append(spec)
        tokens = tokens[1:]
    if len(terms) == 1:
        return terms[0], tokens
    # Each drafter may draft as many tokens as are asked for in all.
    below = tuple(replace(term, num_draft_tokens=MAX_DRAFT_TOKENS) for term in terms)
    return SpecConfig("first", below=below), tokens


def _atom(text: str) -> SpecConfig:
    """Parse a drafter's name, `name:model`, or a model."""
    name, colon, model = text.partition(":")
    if name in registry.names("drafters") and (model or not colon):
        return SpecConfig(name, model or None)
    return SpecConfig("draft_model", text)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. A `max_pass_ms` of inf is no limit; the `template_date` stands still while it runs."""

    max_num_rows: int = within(512, 1, help="most tokens that one pass computes")
    max_num_seqs: int = within(32, 1, help="most sequences that run at once")
    max_pass_ms: float = within(
        100.0, 0, above=True, help="most milliseconds that prompts may add to a pass while others stream their output"
    )
    max_model_len: int | None = within(None, 2, help="longest text in tokens; unset: the model's own context")
    format: str = setting("auto", "number format of the weights: auto (the checkpoint's), w8a8, ... (`sameseed info`)")
    backend: str = setting("auto", "kernels to use: cpu, reference, ...; auto: the fastest that runs here")
    device: str = setting("cpu", "cpu, cuda, cuda:1, ...")
    threads: int | None = within(None, 1, 1024, help="CPU threads; unset: as many as the backend finds useful")
    gpu_memory_utilization: float = within(0.9, 0, 1, True, "share of a GPU's memory for weights, KV cache and passes")
    profile: str | None = setting(None, "file of `sameseed tune`; its choice is the default of the other flags")
    force_profile: bool = setting(False, "use it even on another machine or for other weights")
    template_date: str | None = setting(None, "the date that chat templates are told, e.g. 2026-11-29; unset: today")
    cache: CacheConfig = field(default_factory=CacheConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)

    def __post_init__(self) -> None:
        fields.check(self)
        if self.max_num_rows < self.max_num_seqs:
            raise ConfigError(
                f"max_num_rows ({self.max_num_rows}) is below max_num_seqs ({self.max_num_seqs}); raise the first"
            )
        try:
            datetime.fromisoformat("2026-01-01" if self.template_date is None else self.template_date)
        except ValueError:
            raise ConfigError(f"template_date must be a date such as 2026-11-29, got {self.template_date!r}") from None


def parse_options(text: str, what: str = "options", example: str = '{"max_ngram": 4}') -> dict[str, object]:
    """A JSON object on the command line, e.g. a drafter's options. Raises ConfigError."""
    value, why = None, ""
    try:
        value = json.loads(text)
    except ValueError as error:
        why = f" ({error})"
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be a JSON object, such as '{example}', got {text!r}{why}")
    return value
