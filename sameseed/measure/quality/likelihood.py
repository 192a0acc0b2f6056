"""Log-likelihoods of given tokens, computed by the engine's own passes with its kernels, weights and KV cache.

Rows run through the paged cache in bounded passes, so keys and values are read back in the cache's format. Logits are
computed only for the rows that need them, so the float32 [R, V] table stays below a fixed size for any vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sameseed.batch import Rows, build_batch
from sameseed.engine.engine import Engine
from sameseed.errors import RequestError
from sameseed.request import SamplingParams, Sequence
from sameseed.tokenizer import Tokenizer

LOGIT_BYTES = 64 << 20  # largest logits table of one pass


@dataclass(frozen=True)
class TextToScore:
    """A token sequence to score: each token from index `start` (at least 1) on, given all tokens before it.

    `others`: alternatives to the last token. They are scored at its position too, without another pass.
    """

    tokens: Seq[int]
    start: int
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scored:
    """For each scored token: negative log-likelihood `nll` (float32, nats), and `greedy`, whether it is the argmax.

    `other_nll` (float32) and `other_greedy`: the same for the text's `others`.
    """

    nll: Tensor
    greedy: Tensor
    other_nll: Tensor
    other_greedy: Tensor


@dataclass
class _Job:
    """One sequence in progress. Row i >= `first` scores token i+1."""

    index: int
    seq: Sequence
    first: int
    others: tuple[int, ...]
    nll: list[Tensor] = field(default_factory=lambda: [torch.zeros(0)])
    greedy: list[Tensor] = field(default_factory=lambda: [torch.zeros(0, dtype=torch.bool)])
    other_nll: Tensor = field(default_factory=lambda: torch.zeros(0))
    other_greedy: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))

    @property
    def left(self) -> int:
        """Number of rows that have not run yet. The last token needs no row, since no token follows it."""
        return len(self.seq) - 1 - self.seq.num_cached

    def wanted(self, start: int, stop: int) -> range:
        """The rows in start..stop-1 whose logits are needed."""
        return range(max(start, self.first), stop)


class Scorer:
    """Scores tokens on an engine that is not decoding at the same time; the cache blocks it used are released."""

    def __init__(self, engine: Engine, logit_bytes: int = LOGIT_BYTES) -> None:
        self.runner = engine.runner
        self.max_len = engine.max_model_len
        self.max_rows = engine.scheduler.max_num_rows
        self.max_logits = max(1, logit_bytes // (4 * self.runner.model.config.vocab_size))

    def score(self, texts: Iterable[TextToScore]) -> Iterator[Scored]:
        """The scores of each text, in order. `texts` is consumed lazily.

        Raises RequestError for a text longer than the context, a token outside the vocabulary, or a bad `start`.
        """
        waiting = enumerate(texts)
        running: deque[_Job] = deque()
        done: dict[int, _Job] = {}
        given = 0
        exhausted = False
        try:
            while running or not exhausted:
                exhausted = self._admit(waiting, running) if not exhausted else True
                if running:
                    self._run(running, done)
                while given in done:
                    job = done.pop(given)
                    yield Scored(torch.cat(job.nll), torch.cat(job.greedy), job.other_nll, job.other_greedy)
                    given += 1
        finally:
            for job in running:
                self.runner.blocks.release(job.seq)

    def _admit(self, waiting: Iterator[tuple[int, TextToScore]], running: deque[_Job]) -> bool:
        """Move texts from `waiting` to `running` until a pass is full. True if `waiting` is exhausted."""
        width = self.runner.model.config.vocab_size
        while sum(job.left for job in running) < self.max_rows:
            following = next(waiting, None)
            if following is None:
                return True
            index, text = following
            if len(text.tokens) > self.max_len + 1:  # the last token is scored by the row before it
                raise RequestError(f"a text of {len(text.tokens)} tokens does not fit the context of {self.max_len}")
            known = all(0 <= t < width for t in (*text.tokens, *text.others))
            if not known or not 1 <= text.start <= len(text.tokens):
                raise RequestError("tokens to score must follow at least one, and be of the model's vocabulary")
            seq = Sequence(-1 - index, text.tokens, SamplingParams(), 0)
            running.append(_Job(index, seq, text.start - 1, text.others))
        return False

    def _run(self, running: deque[_Job], done: dict[int, _Job]) -> None:
        """Run one pass over rows of the first jobs, within the limits of rows, logits and cache blocks."""
        rows, spans, left, logits = [], [], self.max_rows, self.max_logits
        for job in running:
            start = job.seq.num_cached
            stop = start + min(job.left, left)
            stop = min(stop, max(start, job.first) + logits) if stop > job.first else stop
            if (stop <= start and job.left) or not self.runner.blocks.reserve(job.seq, max(stop, 1)):
                break
            left -= stop - start
            logits -= len(job.wanted(start, stop))
            spans.append((job, start, stop))
            if stop > start:
                rows.append(Rows(job.seq.token_ids[start:stop], start, [], [], job.seq.blocks, False))
            if stop < len(job.seq) - 1:
                break  # only a part of this job fit: the pass is full
        assert spans, "one sequence always fits: the cache holds the longest"
        if rows:
            self._pass(rows, [span for span in spans if span[2] > span[1]])
        for job, _, _ in spans:
            if not job.left:
                self.runner.blocks.release(job.seq)
                running.popleft()
                done[job.index] = job

    def _pass(self, rows: list[Rows], spans: list[tuple[_Job, int, int]]) -> None:
        """Run the rows, and keep for each wanted row the score of the token after it."""
        wanted: list[int] = []
        targets: list[int] = []
        offset = 0
        for job, start, stop in spans:
            its = job.wanted(start, stop)
            wanted += [offset + i - start for i in its]
            targets += [job.seq.token_ids[i + 1] for i in its]
            offset += stop - start
        device = self.runner.model.device
        batch = build_batch(rows, self.runner.cache.block_size, device)
        # A pass computes at least one row of logits; if no row is wanted, the last row's logits are discarded.
        ask = torch.tensor(wanted or [offset - 1], dtype=torch.int32, device=device)
        logits, _ = self.runner.model.forward(replace(batch, logit_rows=ask), self.runner.cache)  # [R, V]
        for job, _, stop in spans:
            job.seq.num_cached = stop
        if not wanted:
            return
        index = torch.tensor(targets, dtype=torch.int64, device=logits.device)[:, None]
        whole, best = logits.logsumexp(dim=-1), logits.argmax(dim=-1)  # [R]
        nll = (whole - logits.gather(1, index)[:, 0]).cpu()
        greedy = (best == index[:, 0]).cpu()
        at = 0
        for job, start, stop in spans:
            count = len(job.wanted(start, stop))
            job.nll.append(nll[at : at + count])
            job.greedy.append(greedy[at : at + count])
            at += count
            if job.others and not job.left:
                others = torch.tensor(job.others, device=logits.device)
                job.other_nll = (whole[at - 1] - logits[at - 1, others]).cpu()
                job.other_greedy = (best[at - 1] == others).cpu()


def split(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Encode context and continuation as one text, and cut the tokens at the first one that the continuation changes.

    Encoding both separately may give tokens that the model never sees together. A token that spans both belongs to the
    continuation. The context part keeps at least one token if the text has two.
    """
    whole, before = tokenizer.encode(context + continuation), tokenizer.encode(context)
    same = next((i for i, (a, b) in enumerate(zip(whole, before)) if a != b), min(len(whole), len(before)))
    cut = min(max(same, 1), max(len(whole) - 1, 0))
    return whole[:cut], whole[cut:]


def log_likelihoods(
    scorer: Scorer, pairs: Seq[tuple[Seq[int], Seq[int]]], report: Callable[[int, int], None] = lambda done, total: None
) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation given its context, and whether greedy decoding would generate it.

    Adjacent pairs with the same context and single-token continuations form a group and share its passes. A context
    too long for the model is cut at its beginning. Raises RequestError for an empty context or continuation, or a
    continuation that does not fit. `report(done, total)` counts groups.
    """
    groups: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = []
    for context, continuation in pairs:
        if not context or not continuation or len(continuation) > scorer.max_len:
            raise RequestError("a continuation is scored after at least one token, and both must fit the context")
        pair = tuple(context)[-(scorer.max_len + 1 - len(continuation)) :], tuple(continuation)
        joins = groups and len(pair[1]) == 1 == len(groups[-1][0][1]) and groups[-1][0][0] == pair[0]
        groups[-1].append(pair) if joins else groups.append([pair])
    texts = (
        TextToScore(
            (*group[0][0], *group[0][1]), len(group[0][0]), tuple(its[0] for _, its in group) if len(group) > 1 else ()
        )
        for group in groups
    )
    found: list[tuple[float, bool]] = []
    for done, (group, scored) in enumerate(zip(groups, scorer.score(texts), strict=True), 1):
        if len(group) > 1:
            found += zip((-scored.other_nll).tolist(), scored.other_greedy.tolist(), strict=True)
        else:
            found.append((-float(scored.nll.double().sum()), bool(scored.greedy.all())))
        report(done, len(groups))
    return found
