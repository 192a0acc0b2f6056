"""The grid of a profile: formats x contexts x rows, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.fields import check_ranges, within
from sameseed.measure.passes import MAX_CHAIN, Pass
from sameseed.models.config import ModelConfig
from sameseed.scheme import QuantScheme


@dataclass(frozen=True)
class ProfileGrid:
    """What a profile measures. `formats` are scheme names; 1 is always added to `rows`, because c is relative to it.

    `seconds`: time budget of all passes together. `repeats`: most runs of one pass; the least is normally three.
    `draft`: a second shape (or model folder), measured interleaved with the first, in `draft_formats`. `layers`: of the
    shape only its first so many. Raises ConfigError or RegistryError for a value out of range.
    """

    formats: tuple[str, ...] = ("bf16",)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (256,)
    kv_format: str = "auto"
    prefill_tokens: int = within(512, 0)
    batch_sizes: tuple[int, ...] = (4, 16)
    threads: int | None = within(None, 1)
    backend: str = "auto"
    device: str = "cpu"
    repeats: int = within(30, 1)
    seconds: float = within(60.0, 0, above=True)
    draft: str | None = None
    draft_formats: tuple[str, ...] = ("auto",)
    layers: int | None = within(None, 1)

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in ("rows", "contexts", "batch_sizes"):
            _check_ascending(name, getattr(self, name), optional=name == "batch_sizes")
        if self.rows[-1] > MAX_CHAIN:
            raise ConfigError(
                f"rows go up to {MAX_CHAIN} (a draft has at most {MAX_CHAIN - 1} tokens), got {self.rows[-1]}"
            )
        for name in ("formats", "draft_formats"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ConfigError(f"{name} must name at least one format, each once, got {','.join(given) or 'none'}")
            for text in given:
                QuantScheme.parse(text)
        if self.kv_format != "auto":
            scheme.kv_formats(self.kv_format)

    def passes(self, config: ModelConfig, role: str = "model") -> tuple[list[Pass], list[Pass]]:
        """(chain passes, prefill and batch passes). Raises ConfigError if the model's context is too short."""
        longest = self.contexts[-1] + self.rows[-1]
        if longest > config.max_model_len:
            raise ConfigError(
                f"a context of {self.contexts[-1]} and {self.rows[-1]} rows are beyond the {role}'s "
                f"{config.max_model_len} tokens; lower the context to {config.max_model_len - self.rows[-1]} or less"
            )
        rows = sorted({1, *self.rows})
        chains = [Pass("chain", context, m) for context in self.contexts for m in rows]
        prompt = min(self.prefill_tokens, config.max_model_len)
        others = [Pass("prefill", 0, prompt)] if prompt else []
        return chains, [*others, *(Pass("batch", self.contexts[0], size) for size in self.batch_sizes)]


def _check_ascending(name: str, values: Seq[int], optional: bool) -> None:
    if not values and not optional:
        raise ConfigError(f"{name} is empty; give at least one number")
    if any(v < 1 for v in values) or any(a >= b for a, b in pairwise(values)):
        raise ConfigError(f"{name} must be whole numbers from 1 on, ascending, got {','.join(map(str, values))}")
