"""Reduced draft vocabularies: fewer rows of a drafter's LM head cost less (FR-Spec: Zhao et al., 2025)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.fields import setting
from sameseed.models.inner import with_tokens
from sameseed.spec.drafter import Drafter


def read_vocabulary(text: str, vocab_size: int) -> Tensor:
    """Token ids int64 [n] from the option `vocabulary`: a number of first ids, or a file. Raises ConfigError."""
    if text.isdecimal():
        if not 1 <= int(text) <= vocab_size:
            raise ConfigError(f"--draft-vocabulary {text}: the target has {vocab_size} tokens; give 1 to {vocab_size}")
        return torch.arange(int(text))
    try:
        content = text if text.startswith("[") else Path(text).expanduser().read_text(encoding="utf-8")
        ids = json.loads(content) if content.lstrip().startswith("[") else [int(t) for t in content.split()]
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no such user's home folder
        raise ConfigError(f"vocabulary {text!r} cannot be read ({error}); name a file of token ids") from None
    if not ids or any(type(t) is not int or not 0 <= t < vocab_size for t in ids):
        raise ConfigError(f"vocabulary {text!r} must list token ids in 0..{vocab_size - 1}")
    return torch.tensor(sorted(set(ids)))


class Reducible(Drafter):
    """Base of drafters with an LM head, of which `runner.model` may have some rows only; `whole` has all of them."""

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        vocabulary: str = setting(
            "",
            "the tokens that may be drafted, if not all: a number (those that the target generates most often), auto "
            "(as many of these as pay), or a file of ids (JSON or one per line), as `sameseed vocabulary` makes; fewer "
            "cost less",
        )

    runner: Any
    whole: Any

    def __init__(self, runner: Any, text: str, vocab_size: int) -> None:
        """`text`: the option `vocabulary`. Raises ConfigError as `read_vocabulary` and `draft_only`."""
        self.runner, self.whole = runner, runner.model
        self.draft_only(read_vocabulary(text, vocab_size) if text else None)

    def draft_only(self, ids: Tensor | None) -> None:
        """From the next pass on, draft only these tokens; None: all. Raises ConfigError if the model has none."""
        self.runner.model = self.whole if ids is None else with_tokens(self.whole, ids)
