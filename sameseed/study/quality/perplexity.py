"""Perplexity by the published protocol: a sliding window of 2048 tokens that moves by 512, each token scored once.

The text is encoded once, as the tokenizer does it (with its begin token, if it writes one, at the very start only);
window k reads tokens [512 k, 512 k + 2048) afresh and scores those that no window scored before. The first token of
the text has nothing to follow and is not scored. Perplexity is exp of the mean over all scored tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
from sameseed.study.quality.bootstrap import Interval, ratio_interval
from sameseed.study.quality.likelihood import Scorer, TextToScore

WINDOW, STRIDE = 2048, 512


@dataclass(frozen=True)
class Perplexity:
    """What a text's tokens cost: `nll` float32 [tokens], nats. Not finite where a format overflows."""

    nll: np.ndarray
    num_bytes: int
    window: int
    stride: int
    whole: bool  # was the whole text read?
    digest: str = ""  # of the text, so that only like is compared

    @property
    def tokens(self) -> int:
        return len(self.nll)

    @property
    def nats(self) -> float:
        return float(self.nll.sum(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """exp of the mean NLL a token; infinite where that overflows."""
        mean = self.nats / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of the text's UTF-8: comparable between tokenizers, where perplexity is not."""
        return self.nats / math.log(2) / self.num_bytes

    def blocks(self) -> tuple[list[float], list[float]]:
        """NLL and number of tokens of each stretch of `stride` tokens: neighbours are not independent."""
        parts = [self.nll[i : i + self.stride] for i in range(0, self.tokens, self.stride)]
        return [float(p.sum(dtype=np.float64)) for p in parts], [float(len(p)) for p in parts]

    def interval(self, seed: int) -> Interval | None:
        return ratio_interval(*self.blocks(), seed, np.exp)


def windows(num_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored token) of each window."""
    scored = 1
    for begin in range(0, num_tokens, stride):
        end = min(begin + window, num_tokens)
        if end > scored:
            yield begin, end, scored
        scored = end
        if end == num_tokens:
            return


def perplexity(
    llm: LLM,
    text: str,
    window: int = WINDOW,
    stride: int = STRIDE,
    max_tokens: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Of a text under the model as it is loaded; `max_tokens`: read no more than these, from its start.

    A window beyond the model's context is clipped to it, a stride beyond the window to the window (the result says).
    `report(done, total)` counts tokens. Raises ConfigError for a text of fewer than two tokens.
    """
    if window < 2 or stride < 1:
        raise ConfigError(f"a window of at least 2 tokens moves by at least 1, got --window {window} --stride {stride}")
    if max_tokens is not None and max_tokens < 2:
        raise ConfigError(f"--tokens must be at least 2, got {max_tokens}: the first token is not scored")
    tokens = llm.tokenizer.encode(text)
    whole = max_tokens is None or max_tokens >= len(tokens)
    tokens = tokens if whole else tokens[:max_tokens]
    if len(tokens) < 2:
        raise ConfigError("the text has fewer than two tokens; give a longer one")
    window = min(window, llm.engine.max_model_len)
    stride = min(stride, window - 1)  # the first token of a window has nothing before it to be scored after
    found: list[np.ndarray] = []
    texts = (TextToScore(tokens[a:b], first - a) for a, b, first in windows(len(tokens), window, stride))
    for scored in Scorer(llm.engine).score(texts):
        found.append(scored.nll.numpy())
        report(sum(map(len, found)), len(tokens) - 1)
    digest = hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:12]
    read = text if whole else llm.tokenizer.decode(tokens)
    return Perplexity(np.concatenate(found), len(read.encode()), window, stride, whole, digest)


def ratio(mine: Perplexity, its: Perplexity, seed: int) -> tuple[float, Interval | None]:
    """One perplexity over another on the same tokens, with its paired interval. Raises ConfigError for others."""
    if mine.digest != its.digest or (mine.window, mine.stride) != (its.window, its.stride):
        raise ConfigError("perplexities of different tokens or windows cannot be divided; use bits per byte")
    a, counts = mine.blocks()
    b, _ = its.blocks()
    interval = ratio_interval([x - y for x, y in zip(a, b, strict=True)], counts, seed, np.exp)
    mean = (mine.nats - its.nats) / mine.tokens
    return (math.exp(mean) if mean < 700 else math.inf), interval
