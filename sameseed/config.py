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
from sameseed.fields import within

MAX_DRAFT_TOKENS = 64
GOODPUT_DRAFT_TOKENS = 12  # the maximum for goodput, unless another is given
# The drafters that a draft means without naming them, by how it is written or by the kind of its folder.
WRITTEN = {"MODEL": "draft_model", "HEAD": "eagle", "BLOCK": "block", "PARALLEL": "parallel"}
WRITTEN |= {"ASSISTANT": "assistant", "MTP": "mtp", "A > MODEL": "cascade", "A + B": "first"}
# `Drafter.owns` of the package's drafters. Loading one would import PyTorch, which the front of a server needs not.
OWNS = {
    **dict.fromkeys(("assistant", "cascade", "draft_model", "parallel"), "model"),
    **dict.fromkeys(("block", "eagle", "mtp"), "head"),
    **dict.fromkeys(("first", "ngram", "suffix"), ""),
    "self_quant": "target",
}


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache: tokens per block, blocks in all (None: what the longest requests need), storage format.

    `prefix_cache`: cached rows of earlier texts of the same tenant are reused for texts with the same beginning.
    """

    block_size: int = within(16, 1, 1024)
    num_blocks: int | None = within(None, 1)
    format: str = "auto"  # auto: bf16 or fp16 if the weights (or the checkpoint's) are, else fp32
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True)
class SpecConfig:
    """How to speculate. `method` is a drafter's name, or "none"; `model` is for drafters that own a model.

    `drafter`: the user's own `Drafter`, an object or a class; `method` is then only its name.
    `num_draft_tokens`: the most draft tokens per round and sequence (0..64). `confidence`: a draft ends once the
    drafter's probability of its last token is below this. `policy` decides draft lengths: "fixed"; "history": by the
    acceptance of earlier drafts; "disco": as long as the whole draft is likely to be accepted, with `confidence` as the
    threshold; or "goodput": as many tokens as pay, which may be none. `options`: the drafter's own Options. `below`:
    the drafters below this one (a cascade's, or those that `first` asks in turn), each with its own settings.
    `overlap`: cores on which the draft model drafts ahead while the target verifies on the others; 0: it waits.
    """

    method: str = "none"
    model: str | None = None
    format: str = "auto"  # weights of the draft model; auto: as the target's, see models.draft_format
    num_draft_tokens: int = within(4, 0, MAX_DRAFT_TOKENS)
    confidence: float | None = within(None, 0, 1)
    policy: str = "fixed"
    options: Mapping[str, object] = field(default_factory=dict)
    below: tuple[SpecConfig, ...] = ()
    overlap: int = within(0, 0)
    drafter: Any = None

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


def draft_text(spec: SpecConfig) -> str:
    """The drafter in the syntax of `parse_draft`, without settings: "ngram", "draft_model", "ngram > cascade"."""
    if spec.method == WRITTEN["A + B"]:
        return " + ".join(f"({draft_text(b)})" if len(b.below) == 1 else draft_text(b) for b in spec.below)
    return " > ".join([*(draft_text(b) for b in spec.below), spec.method])


def owns(method: str) -> str:
    """`Drafter.owns` of a drafter; one of the package is not loaded. Raises RegistryError for an unknown name."""
    return OWNS[method] if method in OWNS else str(registry.load("drafters", method).DRAFTER.owns)


def parse_draft(text: str) -> SpecConfig:
    """A SpecConfig from text: a drafter's name, a model (a folder, a hub id, "embedded-draft"), or `name:model`.

    `a + b`: drafter a first, and b if a has no draft. `a > m`: model m writes the draft, helped by drafter a. `+` binds
    tighter than `>`; brackets group. Raises ConfigError with the place.
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
        method = WRITTEN["A > MODEL"] if upper.method == WRITTEN["MODEL"] else upper.method
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
    return SpecConfig(WRITTEN["A + B"], below=below), tokens


def _atom(text: str) -> SpecConfig:
    """Parse a drafter's name, `name:model`, or a model."""
    name, colon, model = text.partition(":")
    if name in registry.names("drafters") and (model or not colon):
        return SpecConfig(name, model or None)
    return SpecConfig(WRITTEN["MODEL"], text)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine: rows per pass, sequences at once, longest request, backend, device, number of threads.

    `gpu_memory_utilization`: the share of a GPU's total memory that the engine may take (as in vLLM). `profile`: the
    file of `sameseed tune` that these settings come from. It must fit this machine, unless `force_profile` is set.
    `template_date`: the date that chat templates are told, which stands still; None: the day when the engine starts.
    """

    max_num_rows: int = within(512, 1)
    max_num_seqs: int = within(32, 1)
    max_pass_ms: float = within(100.0, 0, above=True)  # inf: no limit
    max_model_len: int | None = within(None, 2)  # a prompt and a token; None: the model's own context
    format: str = "auto"  # weights: auto keeps what the checkpoint stores
    backend: str = "auto"
    device: str = "cpu"
    threads: int | None = within(None, 1)
    gpu_memory_utilization: float = within(0.9, 0, 1, above=True)
    profile: str | None = None
    force_profile: bool = False
    template_date: str | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)

    def __post_init__(self) -> None:
        fields.check(self)
        if self.max_num_rows < self.max_num_seqs:
            raise ConfigError(
                f"max_num_rows ({self.max_num_rows}) is below max_num_seqs ({self.max_num_seqs}): every running "
                "sequence needs a row a pass; raise the first or lower the second"
            )
        try:
            datetime.fromisoformat(self.template_date or "2026-01-01")
        except ValueError:
            raise ConfigError(f"template_date must be a date such as 2026-11-29, got {self.template_date!r}") from None


def parse_options(text: str, what: str = "options") -> dict[str, object]:
    """A JSON object on the command line, e.g. a drafter's options. Raises ConfigError."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be a JSON object, such as '{{\"max_ngram\": 4}}', got {text!r}")
    return value
