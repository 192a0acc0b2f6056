"""Log-likelihoods of given tokens, and perplexity, by the engine's own kernels, weights and KV cache.

Rows run through the paged cache in bounded passes, so keys and values are read back in the cache's format. Logits are
computed only for the rows that need them, so the float32 [R, V] table stays below a fixed size for any vocabulary.

Perplexity, exp of the mean NLL, follows the published protocol: a window of 2048 tokens moves by 512 over the text,
which is encoded once; each window begins with an empty cache and scores the tokens that no earlier one scored. The
first token of the text has no context and is not scored.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sameseed.batch import Rows, build_batch
from sameseed.engine.engine import Engine
from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, RequestError
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence

LOGIT_BYTES = 64 << 20  # largest logits table of one pass
Text = tuple[Seq[int], int]  # tokens, and the index (at least 1) of the first one to score
Part = tuple[int, Tensor, Tensor]  # index of a text, its next scored tokens int64 [n], the logits [n, V] before them
WINDOW, STRIDE = 2048, 512


def forced(
    runner: ModelRunner, texts: Iterable[Text], max_len: int, max_rows: int, logit_bytes: int = LOGIT_BYTES
) -> Iterator[Part]:
    """The logits before each scored token, text by text; those of a long text come in several parts.

    `runner` must be idle; the cache blocks used are free again afterwards. `texts` is consumed lazily. Raises
    RequestError for a text longer than the context, a token outside the vocabulary, or nothing to score.
    """
    width, running = runner.model.config.vocab_size, deque[tuple[int, Sequence, int]]()
    max_logits = max(1, logit_bytes // (4 * width))

    def arriving() -> Iterator[tuple[int, Sequence, int]]:
        for index, (tokens, start) in enumerate(texts):
            if len(tokens) > max_len + 1:  # the last token is scored by the row before it
                raise RequestError(f"a text of {len(tokens)} tokens does not fit the context of {max_len}")
            if not 1 <= start < len(tokens) or not all(0 <= t < width for t in tokens):
                raise RequestError("tokens to score must follow at least one, and be of the model's vocabulary")
            running.append((index, Sequence(-1 - index, tokens, SamplingParams(), 0), start))
            yield running[-1]

    fresh = arriving()
    try:
        while parts := _next_pass(runner, chain(tuple(running), fresh), max_rows, max_logits):
            logits, at = _run(runner, parts), 0  # [R, V]
            for index, seq, scored in parts:
                if scored.stop == len(seq) - 1:
                    runner.blocks.release(seq)
                    running.popleft()
                if scored:
                    tokens = torch.tensor(seq.token_ids[scored.start + 1 : scored.stop + 1], device=logits.device)
                    yield index, tokens, logits[at : at + len(scored)]
                at += len(scored)
        assert not running, "one sequence always fits: the cache holds the longest"
    finally:
        for _, seq, _ in running:
            runner.blocks.release(seq)


def _next_pass(
    runner: ModelRunner, jobs: Iterable[tuple[int, Sequence, int]], max_rows: int, max_logits: int
) -> list[tuple[int, Sequence, range]]:
    """The first jobs' next rows within the limits of rows, logits and cache blocks; the range has those with logits."""
    parts: list[tuple[int, Sequence, range]] = []
    for index, seq, start in jobs:
        first = max(seq.num_cached, start - 1)
        stop = min(len(seq) - 1, seq.num_cached + max_rows, first + max_logits)
        if stop <= seq.num_cached or not runner.blocks.reserve(seq, stop):
            break
        max_rows, max_logits = max_rows - (stop - seq.num_cached), max_logits - max(0, stop - first)
        parts.append((index, seq, range(min(first, stop), stop)))
        if stop < len(seq) - 1:
            break  # only a part of this job fit: the pass is full
    return parts


def _run(runner: ModelRunner, parts: Seq[tuple[int, Sequence, range]]) -> Tensor:
    """Run the rows up to the end of each range, and return the logits of the rows in the ranges."""
    rows, wanted, at, device = list[Rows](), list[int](), 0, runner.model.device
    for _, seq, scored in parts:
        first, stop = seq.num_cached, scored.stop
        state = (seq.slot, seq.num_settled, stop) if runner.cache.states is not None else None
        rows.append(Rows(seq.token_ids[first:stop], first, [], [], seq.blocks, False, state=state))
        wanted += [at + i - first for i in scored]
        at += stop - first
    if runner.cache.states is not None:
        runner.cache.states.copy(runner.blocks.kept.copies)
    # A pass computes at least one row of logits; if no row is wanted, the last row's logits are discarded.
    ask = torch.tensor(wanted or [at - 1], dtype=torch.int32, device=device)
    batch = build_batch(rows, runner.cache.block_size, device)
    logits, *_ = runner.model.run(replace(batch, logit_rows=ask), runner.cache)
    for _, seq, scored in parts:
        seq.num_cached = seq.num_settled = scored.stop
    return logits


def log_likelihoods(
    engine: Engine, pairs: Seq[tuple[Seq[int], Seq[int]]], report: Callable[[int, int], None] = lambda done, total: None
) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation given its context, and whether greedy decoding would generate it.

    Adjacent pairs with the same context and single-token continuations share its passes. A context too long for the
    model is cut at its beginning. Raises RequestError for an empty context or continuation, or a continuation that does
    not fit. `report(done, total)` counts contexts.
    """
    texts, lasts, max_len = list[Text](), list[list[int]](), engine.max_model_len
    for context, continuation in pairs:
        if not context or not continuation or len(continuation) > max_len:
            raise RequestError("a continuation is scored after at least one token, and both must fit the context")
        tokens = (*context[-(max_len + 1 - len(continuation)) :], *continuation)
        text = tokens, len(tokens) - len(continuation)
        if len(continuation) == 1 and texts and texts[-1][1] == text[1] and texts[-1][0][:-1] == tokens[:-1]:
            lasts[-1].append(tokens[-1])
        else:
            texts.append(text)
            lasts.append([tokens[-1]])
    found = [[(0.0, True)] for _ in texts]
    for index, tokens_, logits in forced(engine.runner, texts, max_len, engine.scheduler.max_num_rows):
        scores, best = logits.log_softmax(-1), logits.argmax(-1)
        if len(lasts[index]) > 1:
            found[index] = [(float(scores[-1, t]), int(best[-1]) == t) for t in lasts[index]]
        else:
            (total, greedy), each = found[index][0], scores.gather(1, tokens_[:, None]).double()
            found[index] = [(total + float(each.sum()), greedy and bool((best == tokens_).all()))]
        report(index + 1, len(texts))
    return list(chain.from_iterable(found))


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
    for start in range(0, RESAMPLES, step):
        counts = generator.multinomial(n, np.full(n, 1.0 / n), size=min(step, RESAMPLES - start))
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
