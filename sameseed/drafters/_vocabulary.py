"""The tokens that a drafter may guess, where not all: fewer rows of its LM head cost less (FR-Spec: Zhao et al., 2025).

The target checks over its whole vocabulary, so a token left out is a guess less, never another text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.models.runner import ModelRunner
from sameseed.models.vocabulary import with_tokens


def read_vocabulary(text: str, vocab_size: int) -> Tensor:
    """Token ids int64 [n] of the option `vocabulary`. Raises ConfigError."""
    if text.isdecimal():
        if not 1 <= int(text) <= vocab_size:
            raise ConfigError(f"vocabulary must be 1..{vocab_size} tokens of the target, got {text}")
        return torch.arange(int(text))
    try:
        content = Path(text).expanduser().read_text(encoding="utf-8")
        ids = json.loads(content) if content.lstrip().startswith("[") else [int(t) for t in content.split()]
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a home folder of nobody
        raise ConfigError(f"vocabulary {text!r} cannot be read ({error}); name a file of token ids") from None
    if not ids or any(type(t) is not int or not 0 <= t < vocab_size for t in ids):
        raise ConfigError(f"vocabulary {text!r} must list token ids in 0..{vocab_size - 1}")
    return torch.tensor(sorted(set(ids)))


def with_vocabulary(runner: ModelRunner, text: str, vocab_size: int) -> ModelRunner:
    """A runner whose model guesses the option's tokens only; itself for "". Raises ConfigError."""
    if not text:
        return runner
    return runner.beside(with_tokens(runner.model, read_vocabulary(text, vocab_size)), runner.captures)


def frequent_tokens(texts: Iterable[Seq[int]], size: int, always: Iterable[int] = ()) -> list[int]:
    """The `size` most frequent tokens of encoded texts, the most frequent first; `always` (end tokens) are among them.

    Fewer where the texts have fewer. Of equals, those with the lower ids. Raises ConfigError below 1, or without texts.
    """
    counts: Counter[int] = Counter()
    for tokens in texts:
        counts.update(tokens)
    if size < 1 or not counts:
        raise ConfigError("a vocabulary needs a size of at least 1, and texts to count tokens in")
    first = list(dict.fromkeys(always))
    ranked = sorted(counts.keys() - set(first), key=lambda t: (-counts[t], t))
    return (first + ranked)[: max(size, len(first))]
