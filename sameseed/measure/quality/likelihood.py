"""Logits before given tokens, and their log-likelihoods, by the engine's own kernels, weights and KV cache.

Rows run through the paged cache in bounded passes, so keys and values are read back in the cache's format. Logits are
computed only for the rows that need them, so the float32 [R, V] table stays below a fixed size for any vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from sameseed.batch import Rows, build_batch
from sameseed.engine.engine import Engine
from sameseed.errors import RequestError
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence

LOGIT_BYTES = 64 << 20  # largest logits table of one pass
Text = tuple[Seq[int], int]  # tokens, and the index (at least 1) of the first one to score
Part = tuple[int, Tensor, Tensor]  # index of a text, its next scored tokens int64 [n], the logits [n, V] before them


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
    logits, _ = runner.model.forward(replace(batch, logit_rows=ask), runner.cache)
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
