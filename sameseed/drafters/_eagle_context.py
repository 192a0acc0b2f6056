"""A draft head's state for each sequence: its cached rows, and the target's hidden states for further rows.

Row t pairs the target's hidden states at position t with token t + 1. If hidden states before a position are missing,
the rows start there: attention depends on distances between positions only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from sameseed.batch import Draw
from sameseed.drafters._choices import Guesses
from sameseed.drafters._followers import CatchUp, Holding
from sameseed.models.block import BlockRunner
from sameseed.models.eagle import HeadRunner
from sameseed.models.eagle_loader import with_vocabulary
from sameseed.request import Sequence
from sameseed.spec.drafter import Parts, Span

KEEP = 64  # hidden states kept of positions that have a cached row, so that as many tokens can be taken back
WAIT_BYTES = 64 << 20  # bytes of hidden states, of all sequences, that may wait for the first draft


class Context:
    """State of one sequence. `holder` owns the blocks; its row 0 is position `start`.

    `parts`: the target's hidden states float32 [n, F] up to position `end`, without gaps, each with its first position.
    """

    def __init__(self, seq: Sequence, position: int) -> None:
        self.holder = Sequence(seq.seq_id, (), seq.params, seq.seed, seq.tenant)
        self.start = self.end = position
        self.parts: deque[tuple[int, Tensor]] = deque()

    @property
    def num_cached(self) -> int:
        return self.holder.num_cached

    @property
    def first(self) -> int:
        """The first position whose hidden states are known."""
        return self.parts[0][0] if self.parts else self.end

    @property
    def next(self) -> int:
        return self.start + self.holder.num_cached

    @property
    def num_pending(self) -> int:
        return self.end - self.next

    @property
    def can_go_on(self) -> bool:
        """True if the hidden states for the next row are known, or those to compute the last row again."""
        return self.first <= self.next and self.first < self.end

    def restart(self, position: int | None = None) -> None:
        """Drop the cached rows; start from the known hidden states, or at `position` with none."""
        if position is not None:
            self.forget(position)
        self.start, self.holder.num_cached = self.first, 0

    def forget(self, position: int) -> None:
        """Drop all hidden states; the next ones to come are for `position`."""
        self.end = position
        self.parts.clear()

    def add(self, span: Span, hidden: Tensor) -> None:
        """Add the hidden states [span, F] of positions that became certain."""
        if not self.start <= span.start <= self.end:  # a gap, or an earlier start than so far
            self.restart(span.start)
        if span.end > self.end:
            self.parts.append((self.end, hidden[self.end - span.start :]))
            self.end = span.end

    def take(self, count: int) -> list[Tensor]:
        """Hidden states for the next `count` rows, in parts."""
        low, high = self.next, self.next + count
        return [x[max(0, low - at) : high - at] for at, x in self.parts if at < high and low < at + len(x)]

    def trim(self) -> None:
        """Drop hidden states that are no longer needed to compute rows."""
        least = self.next - KEEP
        while self.parts and self.first + len(self.parts[0][1]) <= least:
            self.parts.popleft()
        if self.parts and least - self.first > KEEP:  # of a prompt's pass
            self.parts[0] = least, self.parts[0][1][least - self.first :].clone()

    def rewind(self, length: int) -> None:
        """Drop the rows that hold tokens from `length` on, and the hidden states there: the tokens are taken back."""
        if not self.parts or length < self.first:
            self.restart(min(length, self.first))
            return
        while self.parts and self.end > length:
            at, part = self.parts.pop()
            if at < length:
                self.parts.append((at, part[: length - at]))
            self.end = max(at, length)
        if length <= self.start:
            self.restart()
        self.holder.num_cached = max(0, min(self.holder.num_cached, length - 1 - self.start))
        if self.next < self.first:
            self.restart()


class Contexts:
    """The contexts of all sequences, in the cache of one runner."""

    def __init__(self, runner: HeadRunner | BlockRunner, prefill_rows: int, limit: int) -> None:
        """`prefill_rows`: the most rows of one pass over known positions; `limit`: the most rows of one sequence."""
        self.runner = runner
        self.reading = CatchUp(prefill_rows)
        self.limit = limit
        self._contexts: dict[int, Context] = {}  # by sequence

    def __len__(self) -> int:
        return len(self._contexts)

    def __getitem__(self, seq: Sequence) -> Context:
        return self._contexts[seq.seq_id]

    def observe(self, seqs: Seq[Sequence], spans: Seq[Span], hidden: Tensor) -> None:
        """Keep the hidden states float32 [sum of spans, F] of positions that became certain.

        A prompt's wait for the first draft, so that the first token is not delayed. Rows are computed at once for what
        does not fit into WAIT_BYTES, and for long stretches later in a text.
        """
        hidden = hidden.clone() if hidden.is_cuda else hidden  # the next pass may write there
        parts = torch.split_with_sizes(hidden, [s.end - s.start for s in spans])
        apart = 1 < len(spans) < len(hidden)  # else a few rows would keep those of others' prompts in memory
        for seq, span, rows in zip(seqs, spans, parts, strict=True):
            self._add(seq, span, rows.clone() if apart else rows)

    def _add(self, seq: Sequence, span: Span, rows: Tensor) -> None:
        context = self._contexts.get(seq.seq_id)
        if context is None:
            context = self._contexts[seq.seq_id] = Context(seq, span.start)
        context.add(span, rows)
        if context.end - context.start > self.limit:  # too long: no more drafts
            context.forget(context.end)
        while context.can_go_on and context.num_pending >= self.reading.max_rows and context.end < len(seq):
            waiting = 4 * rows.shape[1] * sum(c.end - c.first for c in self._contexts.values())  # bytes
            if context.holder.num_cached == 0 and waiting <= WAIT_BYTES:
                break
            if not self._reserve(context, self.reading.max_rows):
                context.restart(context.end)
                break
            self._extend([(seq, context, self.reading.max_rows)], False)

    def _reserve(self, context: Context, num_rows: int) -> bool:
        return self.runner.blocks.reserve(context.holder, context.holder.num_cached + num_rows)

    def _extend(
        self, work: Seq[tuple[Sequence, Context, int]], wants_logits: bool, draws: Seq[Draw] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        tokens = [seq.token_ids[c.next + 1 : c.next + 1 + n] for seq, c, n in work]
        hidden = [part for _, c, n in work for part in c.take(n)]
        out = self.runner.extend([c.holder for _, c, _ in work], tokens, hidden, wants_logits, draws)
        for _, context, _ in work:
            context.trim()
        return out

    def num_read(self, seq: Sequence) -> int:
        context = self._contexts.get(seq.seq_id)
        return 0 if context is None else context.next

    @contextmanager
    def drafting(
        self, seqs: Seq[Sequence], wanted: Seq[int], num_nodes: Callable[[int, int], int]
    ) -> Iterator[dict[int, int]]:
        """A context with the number of tokens, at most wanted[b], that the head can draft now, by index of sequence.

        Inside, there are blocks for all certain rows and for num_nodes(b, tokens) nodes.
        """
        blocks = self.runner.blocks
        if blocks.num_free * 4 < blocks.num_blocks:  # sequences that do not run free theirs, and compute rows again
            running = {seq.seq_id for seq in seqs}
            for context in (c for seq_id, c in self._contexts.items() if seq_id not in running):
                blocks.release(context.holder)
                context.restart()
        states, counts = dict[int, Context](), dict[int, int]()
        for b, (seq, most) in enumerate(zip(seqs, wanted, strict=True)):
            own = self._contexts.get(seq.seq_id)
            if own is None or own.end != len(seq) - 1 or not own.can_go_on:
                continue
            last = own.end - 1 - own.start
            if (count := min(most, self.limit - last)) > 0:
                own.holder.num_cached = min(own.holder.num_cached, last)  # computed again: its logits are needed
                if self._reserve(own, own.num_pending + num_nodes(b, count)):
                    states[b], counts[b] = own, count
        ready = self.reading(
            seqs, states, lambda sizes: self._extend([(seqs[b], states[b], n) for b, n in sizes.items()], False)
        )
        try:
            yield {b: counts[b] for b in ready}
        finally:
            for own in states.values():
                blocks.trim(own.holder, own.holder.num_cached)  # blocks of draft rows

    def last(self, seqs: Seq[Sequence], draws: Seq[Draw] | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the pending rows. Returns what `HeadRunner.extend` returns for each sequence's last row."""
        return self._extend([(seq, self[seq], self[seq].num_pending) for seq in seqs], True, draws)

    def rewind(self, seq: Sequence, length: int) -> None:
        context = self._contexts.get(seq.seq_id)
        if context is not None:
            context.rewind(length)

    def release(self, seq: Sequence) -> None:
        context = self._contexts.pop(seq.seq_id, None)
        if context is not None:
            self.runner.blocks.release(context.holder)


class Reading(Holding):
    """Base of drafters with a head of their own, which follows each sequence by the target's hidden states."""

    owns = "head"
    kind: ClassVar[type[HeadRunner | BlockRunner]] = HeadRunner  # the runner of its heads
    followers: Contexts
    runner: Any

    def __init__(self, options: Any, parts: Parts) -> None:
        assert isinstance(parts.head, self.kind)
        runner: Any = parts.head
        target, config = parts.target.model.config, runner.model.config
        config.check_target(target)
        self._eos = target.eos_token_ids
        super().__init__(runner, options.vocabulary, target.vocab_size)
        self.options, self.policy = options, parts.policy
        self.branches, self.captures = self.branches_with(options), config.captures(target.num_layers)
        self.followers = Contexts(runner, options.prefill_rows, runner.model.max_model_len)

    def draft_only(self, ids: Tensor | None) -> None:
        model = self.runner.model = self.whole if ids is None else with_vocabulary(self.whole, ids)
        self.guesses = Guesses(model.weights.target_ids, model.config.layer.vocab_size, self._eos)

    def observe(self, seqs: Seq[Sequence], spans: Seq[Span], hidden: Tensor | None) -> None:
        if hidden is not None:
            self.followers.observe(seqs, spans, hidden)
