"""Perplexity by the published protocol: a sliding window of 2048 tokens that moves by 512, each token scored once.

The text is encoded once by the tokenizer; a BOS token, if the tokenizer adds one, is only at the start. Window k reads
tokens [512 k, 512 k + 2048) with an empty cache, and scores those that no earlier window scored. The first token of the
text has no context and is not scored. Perplexity is exp of the mean NLL over all scored tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.nn.functional import cross_entropy

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
from sameseed.measure.quality.likelihood import forced

WINDOW, STRIDE = 2048, 512


@dataclass(frozen=True)
class Perplexity:
    """Negative log-likelihoods of a text's tokens: `nll` float32 [tokens], nats. Not finite if a format overflows."""

    nll: np.ndarray
    num_bytes: int
    window: int
    stride: int
    whole: bool  # was the whole text read?
    digest: str = ""  # of the tokens: only perplexities of the same tokens can be compared

    @property
    def tokens(self) -> int:
        return len(self.nll)

    @property
    def nats(self) -> float:
        return float(self.nll.sum(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """exp of the mean NLL per token; infinite if that overflows."""
        mean = self.nats / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the UTF-8 text: comparable between tokenizers, unlike perplexity."""
        return self.nats / math.log(2) / self.num_bytes

    def blocks(self) -> tuple[list[float], list[float]]:
        """NLL and number of tokens of each stretch of `stride` tokens, the bootstrap's units."""
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
    """Perplexity of a text under the loaded model. `max_tokens`: read only so many tokens, from the start of the text.

    The window is clipped to the model's context, and the stride to less than the window; the result holds the values
    used. `report(done, total)` counts tokens. Raises ConfigError for a text of fewer than two tokens.
    """
    tokens = llm.tokenizer.encode(text)
    whole = max_tokens is None or max_tokens >= len(tokens)
    tokens = tokens if whole else tokens[:max_tokens]
    if len(tokens) < 2:
        raise ConfigError("the text has fewer than two tokens; give a longer one")
    window = min(window, llm.engine.max_model_len)
    stride = min(stride, window - 1)  # the first token of a window has no context, so an earlier window must score it
    found: list[np.ndarray] = []
    texts = ((tokens[a:b], first - a) for a, b, first in windows(len(tokens), window, stride))
    rows = llm.engine.scheduler.max_num_rows
    for _, targets, logits in forced(llm.engine.runner, texts, llm.engine.max_model_len, rows):
        found.append(cross_entropy(logits, targets, reduction="none").cpu().numpy())
        report(sum(map(len, found)), len(tokens) - 1)
    digest = hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:12]
    read = text if whole else llm.tokenizer.decode(tokens)
    return Perplexity(np.concatenate(found), len(read.encode()), window, stride, whole, digest)


def ratio(mine: Perplexity, its: Perplexity, seed: int) -> tuple[float, Interval | None]:
    """Ratio of two perplexities on the same tokens, with its paired interval. Raises ConfigError for other tokens."""
    if mine.digest != its.digest or (mine.window, mine.stride) != (its.window, its.stride):
        raise ConfigError("perplexities of different tokens or windows cannot be divided; use bits per byte")
    a, counts = mine.blocks()
    b, _ = its.blocks()
    interval = ratio_interval([x - y for x, y in zip(a, b, strict=True)], counts, seed, np.exp)
    mean = (mine.nats - its.nats) / mine.tokens
    return (math.exp(mean) if mean < 700 else math.inf), interval


Interval = tuple[float, float]
RESAMPLES = 2000
LEVEL = 0.95
CHUNK = 1 << 22  # most resampling counts in memory at once


@np.errstate(over="ignore", invalid="ignore")  # values that are not finite are left out
def ratio_interval(
    parts: Seq[float],
    wholes: Seq[float],
    seed: int,
    transform: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Interval of transform(sum(parts) / sum(wholes)) over resampled units; None for fewer than two units.

    With `wholes` of 1: the mean. With NLLs, token counts and `transform` exp: perplexity. With differences of two
    models' NLLs instead: the paired ratio of their perplexities.
    """
    top, bottom = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    n = len(top)
    if n < 2:
        return None
    generator = np.random.default_rng(seed)
    step = max(1, CHUNK // n)
    found = []
    for start in range(0, resamples, step):
        counts = generator.multinomial(n, np.full(n, 1.0 / n), size=min(step, resamples - start))
        below = counts @ bottom
        found.append(np.divide(counts @ top, below, out=np.full(len(below), np.nan), where=below > 0))
    values = transform(np.concatenate(found))
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean_interval(values: Seq[float], seed: int) -> Interval | None:
    """Interval of the mean of independent values: a task's scores, or the differences of two models' scores."""
    return ratio_interval(values, [1.0] * len(values), seed)


def estimate(value: float, interval: Interval | None) -> dict[str, Any]:
    """A value with its interval as plain data for a record. Both are None if the value is not finite."""
    finite = math.isfinite(value)
    return {"value": value if finite else None, "interval": interval if finite else None}
