"""Tuned: the TOML file that `sameseed tune` writes and LLM, serve, generate, chat and bench read.

It says for which machine, model and texts settings were chosen, what they were, and what else was tried.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields as members
from pathlib import Path
from typing import Any

from sameseed import fields
from sameseed.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TUNED_SCHEMA = "sameseed.profile-file/1"
TABLE_END = 4096  # sequences: where the last row of a table by batch ends, for an engine that wants an end


@dataclass(frozen=True)
class TunedMachine:
    """What costs depend on. A file of another one is refused."""

    cpu: str
    threads: int
    isa: str = ""  # of the native kernels; "": without them
    gpu: str = ""

    def differs(self, here: TunedMachine) -> str | None:
        """What is not the same, in words; None: nothing."""
        for f in members(self):
            mine, its = getattr(self, f.name), getattr(here, f.name)
            if mine != its:
                return f"{f.name} {mine or 'none'} there, {its or 'none'} here"
        return None


@dataclass(frozen=True)
class TunedModel:
    """`id`: a folder, a hub id or "embedded". `digest` of its weights, by `store.weights_key`; "": not known."""

    id: str
    digest: str = ""


@dataclass(frozen=True)
class Scope:
    """For what the choice was measured: beyond it, it is a guess, and goodput decides instead.

    `prompt_tokens` and `output_tokens`: (shortest, longest); `context`: most tokens of a text; `batch`: sequences at
    once that were tried.
    """

    prompts: str = ""  # digest
    num_prompts: int = 0
    domains: tuple[str, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    temperature: tuple[float, ...] = ()
    batch: tuple[int, ...] = ()
    context: int = 0

    def covers(self, temperature: float) -> bool:
        """Was this temperature among those measured, or between two of them?"""
        return not self.temperature or min(self.temperature) <= temperature <= max(self.temperature)

    def beyond(self, max_num_seqs: int) -> str | None:
        """Why so many sequences at once lie outside of it; None: they do not."""
        if not self.batch or max_num_seqs <= max(self.batch):
            return None
        return f"max_num_seqs {max_num_seqs} is above the {max(self.batch)} sequences that were tried"


@dataclass(frozen=True)
class Chosen:
    """Flags of `serve`, by the same names; None: as the command has it. `by_batch`: draft tokens by sequences at once.

    `by_batch` holds (first, length) pairs, ascending: from `first` sequences on, `length` draft tokens each.
    """

    format: str | None = None
    kv_format: str | None = None
    draft: str | None = None
    draft_format: str | None = None
    num_draft_tokens: int | None = None
    draft_options: Mapping[str, Any] | None = None
    policy: str | None = None
    max_num_seqs: int | None = None
    threads: int | None = None
    by_batch: tuple[tuple[int, ...], ...] = ()

    def settings(self) -> dict[str, Any]:
        """What was chosen, as keyword arguments of LLM."""
        every = {f.name: getattr(self, f.name) for f in members(self) if f.name != "by_batch"}
        return {name: value for name, value in every.items() if value is not None}

    def ranges(self) -> list[tuple[int, int, int]]:
        """`by_batch` as (first, last, length), both ends included."""
        ends = [first - 1 for first, _ in self.by_batch[1:]] + [TABLE_END]
        return [(first, last, length) for (first, length), last in zip(self.by_batch, ends, strict=True)]


@dataclass(frozen=True)
class TunedFigure:
    """A number with its interval (80 %), how it was found, and where it was predicted: predicted over measured, less 1.

    `grade`: "paper" (bytes and datasheet), "profiled" (measured costs), "anchored" (and real runs), "measured".
    """

    value: float
    low: float
    high: float
    grade: str = "measured"
    error: float | None = None


@dataclass(frozen=True)
class PassCosts:
    """Milliseconds of passes over `rows` rows after `context` tokens: the target's, and a step of the draft model's.

    `draft_start_ms`: of a proposal before its first step; `gap_ms`: between passes (Python, launches, sampling).
    """

    rows: tuple[int, ...] = ()
    ms: tuple[float, ...] = ()
    draft_ms: tuple[float, ...] = ()
    draft_start_ms: float = 0.0
    gap_ms: float = 0.0
    context: int = 0


@dataclass(frozen=True)
class AcceptRates:
    """How often draft tokens are right, by place, under the names of ModelOpt's speculation_profile.json.

    `conditional_accept_rates`: where all before were; `marginal_accept_rates`: of all drafts; `mean_accept_length`
    counts the bonus token.
    """

    conditional_accept_rates: tuple[float, ...] = ()
    marginal_accept_rates: tuple[float, ...] = ()
    mean_accept_length: float = 1.0
    num_samples: int = 0


@dataclass(frozen=True)
class Loser:
    """Settings that were not chosen: why, and by how much (its ratio).

    Why: "slower", "first token", "memory", "late" (a bound was missed), "quality", "dominated" (by prediction), "time"
    (none was left to measure it), "impossible" (`note` says why).
    """

    settings: Mapping[str, Any]
    why: str
    speed: float | None = None  # tokens/s over those of the chosen
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Tuned:
    """A file. `predicted`, `measured`, `quality`: figures by name (tokens_per_s, speedup, ttft_s, perplexity_ratio)."""

    machine: TunedMachine
    model: TunedModel
    chosen: Chosen
    scope: Scope = field(default_factory=Scope)
    predicted: Mapping[str, TunedFigure] = field(default_factory=dict)
    measured: Mapping[str, TunedFigure] = field(default_factory=dict)
    quality: Mapping[str, TunedFigure] = field(default_factory=dict)
    cost: PassCosts = field(default_factory=PassCosts)
    acceptance: AcceptRates = field(default_factory=AcceptRates)
    rejected: tuple[Loser, ...] = ()
    date: str = ""
    commit: str = ""

    @classmethod
    def read(cls, path: str | Path) -> Tuned:
        """A file. Raises ConfigError for one that is none, or of another schema."""
        path = Path(path).expanduser()
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read profile {path} ({error.strerror}); `sameseed tune` writes one") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"profile {path} is no TOML: {error}; mend it, or tune again") from None
        schema = table.pop("schema", None)
        if schema != TUNED_SCHEMA:
            raise ConfigError(
                f"profile {path} has schema {schema!r}, this version reads {TUNED_SCHEMA!r}; tune again (a cost "
                "profile, written by `sameseed profile`, is for --cost)"
            )
        return cls.from_dict(table, f"profile {path}")

    @classmethod
    def from_dict(cls, table: dict[str, Any], where: str = "profile") -> Tuned:
        """From plain data, as TOML gives it. Raises ConfigError with the key."""
        for name in ("predicted", "measured", "quality"):
            rows = table.get(name, {})
            table[name] = {key: fields.parse(TunedFigure, row, f"{where}: {name}.{key}") for key, row in rows.items()}
        chosen = table.get("chosen")
        if isinstance(chosen, dict) and isinstance(chosen.get("by_batch"), dict):
            chosen["by_batch"] = _pairs(chosen["by_batch"], where)
        return fields.parse(cls, table, where)


def _pairs(table: Mapping[str, Any], where: str) -> tuple[tuple[int, int], ...]:
    """(first, length) from rows like `3-8 = 2`. Raises ConfigError for others, and for gaps."""
    try:
        rows = sorted(
            (int(first), last, int(k)) for (first, _, last), k in ((x.partition("-"), k) for x, k in table.items())
        )
        whole = [int(last) + 1 for _, last, _ in rows[:-1]] == [first for first, _, _ in rows[1:]]
    except (ValueError, TypeError):
        whole = False
    if not whole or (rows and rows[0][0] != 1):
        raise ConfigError(
            f"{where}: chosen.by_batch wants rows without gaps, like 1-2 = 5, 3-8 = 2, 9- = 0; got {table}"
        )
    return tuple((first, k) for first, _, k in rows)
