"""Tuned: the profile (a TOML file) that `sameseed tune` writes and LLM, serve, generate, chat and bench read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields as members
from pathlib import Path
from typing import Any

from sameseed import fields
from sameseed.config import MAX_DRAFT_TOKENS
from sameseed.errors import ConfigError
from sameseed.fields import tomllib
from sameseed.lines import read_text

TUNED_SCHEMA = "sameseed.profile-file/1"
TABLE_END = 4096  # batch size at which the last range of `by_batch` ends, for engines that need an end


@dataclass(frozen=True)
class TunedMachine:
    """The machine, as far as costs depend on it. A profile of another machine is refused."""

    cpu: str
    threads: int
    isa: str = ""  # instruction set of the native kernels; "": no native kernels
    gpu: str = ""

    def differs(self, here: TunedMachine) -> str | None:
        """The first difference, as text; None if there is none."""
        for f in members(self):
            mine, its = getattr(self, f.name), getattr(here, f.name)
            if mine != its:
                return f"{f.name} {mine or 'none'} there, {its or 'none'} here"
        return None


@dataclass(frozen=True)
class TunedModel:
    """The model. `id`: a folder, a hub id or "embedded"; `digest`: `store.weights_key` of its weights, "": unknown."""

    id: str
    digest: str = ""


@dataclass(frozen=True)
class Scope:
    """What the choice was measured for. Outside of it goodput decides draft lengths."""

    prompts: str = ""  # digest
    num_prompts: int = 0
    domains: tuple[str, ...] = ()
    prompt_tokens: tuple[int, ...] = ()  # the shortest and the longest
    output_tokens: tuple[int, ...] = ()
    temperature: tuple[float, ...] = ()
    batch: tuple[int, ...] = ()  # the batch sizes that were tried
    context: int = 0  # most tokens of a text

    def covers(self, temperature: float) -> bool:
        """Is this temperature within the range of those measured?"""
        return not self.temperature or min(self.temperature) <= temperature <= max(self.temperature)


@dataclass(frozen=True)
class Chosen:
    """The chosen settings, named like the flags of `serve`; None: the command's default."""

    format: str | None = None
    kv_format: str | None = None
    draft: str | None = None
    draft_format: str | None = None
    num_draft_tokens: int | None = None
    draft_options: Mapping[str, Any] | None = None
    policy: str | None = None
    max_num_seqs: int | None = None
    threads: int | None = None
    by_batch: tuple[tuple[int, ...], ...] = ()  # (first, length): from `first` sequences on, `length` draft tokens each

    def settings(self) -> dict[str, Any]:
        """The chosen settings as keyword arguments of LLM."""
        every = {f.name: getattr(self, f.name) for f in members(self) if f.name != "by_batch"}
        return {name: value for name, value in every.items() if value is not None}

    def ranges(self) -> list[tuple[int, int, int]]:
        """`by_batch` as (first, last, length), both ends included."""
        ends = [first - 1 for first, _ in self.by_batch[1:]] + [TABLE_END]
        return [(first, last, length) for (first, length), last in zip(self.by_batch, ends, strict=True)]


@dataclass(frozen=True)
class TunedFigure:
    """A number with its 80 % interval."""

    value: float
    low: float
    high: float
    grade: str = "measured"  # or "paper" (from bytes and datasheets), or "profiled" (from measured costs)
    error: float | None = None  # if it was predicted, predicted over measured value, less 1


@dataclass(frozen=True)
class AcceptRates:
    """Acceptance rates of draft tokens by position, named as in ModelOpt's speculation_profile.json."""

    conditional_accept_rates: tuple[float, ...] = ()  # given that all tokens before were accepted
    marginal_accept_rates: tuple[float, ...] = ()  # over all drafts
    mean_accept_length: float = 1.0  # the bonus token counts
    num_samples: int = 0


@dataclass(frozen=True)
class Loser:
    """Settings that were not chosen, and the reason.

    `why`: "slower", "first token", "memory", "late" (a bound was missed), "quality", "dominated" (by prediction),
    "time" (none was left to measure them), or "impossible" (`note` says why).
    """

    settings: Mapping[str, Any]
    why: str
    speed: float | None = None  # tokens/s relative to the chosen settings
    low: float | None = None  # the interval of `speed`
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Tuned:
    """A profile: the chosen settings, the machine, model and texts for which they were chosen, and what else was tried.

    `predicted`, `measured`, `quality`: figures by name: tokens_per_s, speedup, ttft_s and perplexity_ratio.
    """

    machine: TunedMachine
    model: TunedModel
    chosen: Chosen
    scope: Scope = field(default_factory=Scope)
    predicted: Mapping[str, TunedFigure] = field(default_factory=dict)
    measured: Mapping[str, TunedFigure] = field(default_factory=dict)
    quality: Mapping[str, TunedFigure] = field(default_factory=dict)
    acceptance: AcceptRates = field(default_factory=AcceptRates)
    rejected: tuple[Loser, ...] = ()
    date: str = ""
    commit: str = ""

    @classmethod
    def read(cls, path: str | Path) -> Tuned:
        """Read a profile. Raises ConfigError for a file that is no profile, or has another schema, with the key."""
        path = Path(os.path.expanduser(path))
        where = f"profile {path}"
        try:
            table = tomllib.loads(read_text(path, "a profile", "`sameseed tune` writes one"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{where} is no TOML: {error}; mend it, or tune again") from None
        schema = table.pop("schema", None)
        if schema != TUNED_SCHEMA:
            raise ConfigError(
                f"{where} has schema {schema!r}, not {TUNED_SCHEMA!r}; tune again (a cost profile: --cost)"
            )
        chosen = table.get("chosen")
        if isinstance(chosen, dict) and isinstance(chosen.get("by_batch"), dict):
            chosen["by_batch"] = _pairs(chosen["by_batch"], where)
        tuned = fields.parse(cls, table, where)
        rates = tuned.acceptance
        chances = (*rates.conditional_accept_rates, *rates.marginal_accept_rates)
        right = all(0 <= chance <= 1.000001 for chance in chances) and 1 <= rates.mean_accept_length < math.inf
        if not (right and all(0 <= length <= MAX_DRAFT_TOKENS for _, length in tuned.chosen.by_batch)):
            raise ConfigError(f"{where} has impossible chances or draft lengths; tune again")
        return tuned


def _pairs(table: Mapping[str, Any], where: str) -> tuple[tuple[int, int], ...]:
    """(first, length) pairs from rows like `3-8 = 2`. Raises ConfigError for other rows, and for gaps."""
    try:
        parts = ((*x.partition("-"), k) for x, k in table.items())
        rows = sorted((int(first), last, int(k)) for first, _, last, k in parts)
        whole = [int(last) + 1 for _, last, _ in rows[:-1]] == [first for first, _, _ in rows[1:]]
    except (ValueError, TypeError):
        whole = False
    if not whole or (rows and rows[0][0] != 1):
        raise ConfigError(f"{where}: chosen.by_batch wants rows without gaps, like 1-2 = 5, 3- = 0; got {table}")
    return tuple((first, k) for first, _, k in rows)
