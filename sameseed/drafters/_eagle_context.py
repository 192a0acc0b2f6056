"""A draft head's state for each sequence: its cached rows, and the target's hidden states for further rows.

Row t pairs the target's hidden states at position t with token t + 1. A head may start in the middle of a text: if
hidden states before a position are missing, the rows start there. This works because attention depends on distances
between positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from itertools import groupby
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
WAIT_ROUNDS = 64  # rounds with one row per sequence that may wait to be sorted by sequence


class Context:
    """State of one sequence. `holder` owns the blocks; its row 0 is position `start`. `hidden[0]` is for `first`."""

    def __init__(self, seq: Sequence, position: int) -> None:
        self.holder = Sequence(seq.seq_id, (), seq.params, seq.seed, seq.tenant)
        self.start = self.first = position
        self._room: Tensor | None = None  # float32 [m, F]; rows _begin.._begin + num_hidden - 1 are the states
        self._begin = self.num_hidden = 0

    @property
    def hidden(self) -> Tensor | None:
        """Hidden states float32 [n, F] of the positions from `first` on."""
        return None if self._room is None else self._room[self._begin : self._begin + self.num_hidden]

    @property
    def end(self) -> int:
        """The position after the last one whose hidden states are known."""
        return self.first + self.num_hidden

    @property
    def num_cached(self) -> int:
        return self.holder.num_cached

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
        self.first, self._room, self._begin, self.num_hidden = position, None, 0, 0

    def add(self, span: Span, hidden: Tensor) -> None:
        """Add the hidden states [span, F] of positions that became certain."""
        if not self.start <= span.start <= self.end:  # a gap, or an earlier start than so far
            self.restart(span.start)
        if span.end <= self.end:
            return
        new, end = hidden[self.end - span.start :], self._begin + self.num_hidden
        # Spare room avoids copying all rows in each round: rows of a large target are long.
        if self._room is None or end + len(new) > len(self._room):
            known = self.hidden
            self._room = new.new_empty(self.num_hidden + len(new) + KEEP, new.shape[1])
            if known is not None:
                self._room[: self.num_hidden] = known
            self._begin, end = 0, self.num_hidden
        self._room[end : end + len(new)] = new
        self.num_hidden += len(new)

    def take(self, count: int) -> Tensor:
        """Hidden states [count, F] for the next rows."""
        assert self._room is not None
        at = self._begin + self.next - self.first
        return self._room[at : at + count]

    def trim(self) -> None:
        """Drop hidden states that are no longer needed to compute rows."""
        surplus = self.next - KEEP - self.first
        if surplus > 0:
            self._begin += surplus
            self.num_hidden -= surplus
            self.first += surplus
        if self._room is not None and len(self._room) > 4 * (self.num_hidden + KEEP):  # room of a prompt
            self._room, self._begin = self._room[self._begin : self._begin + self.num_hidden].clone(), 0

    def rewind(self, length: int) -> None:
        """Drop the rows that hold tokens from `length` on, and the hidden states there: the tokens are taken back."""
        if self._room is None or length < self.first:
            self.restart(min(length, self.first))
            return
        self.num_hidden = min(self.num_hidden, length - self.first)
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
        self._sorted: dict[int, Context] = {}
        self._waiting: list[tuple[Seq[Sequence], Seq[Span], Tensor]] = []  # rounds of one row per sequence
        self._gone: set[int] = set()  # sequences in waiting rounds that have ended

    def __len__(self) -> int:
        return len(self._contexts)

    def __getitem__(self, seq: Sequence) -> Context:
        return self._contexts[seq.seq_id]

    @property
    def _contexts(self) -> dict[int, Context]:
        """Contexts by sequence, with the waiting rounds sorted in."""
        if self._waiting:
            self._sort()
        return self._sorted

    def observe(self, seqs: Seq[Sequence], spans: Seq[Span], hidden: Tensor) -> None:
        """Keep the hidden states float32 [sum of spans, F] of positions that became certain.

        A prompt's hidden states wait for the first draft, so that the first token is not delayed. Rows are computed at
        once for what does not fit into WAIT_BYTES, and for long stretches later in a text.
        """
        if len(hidden) == len(spans):  # only queued, so that rounds without a draft cost next to nothing
            self._waiting.append((seqs, spans, hidden.clone() if hidden.is_cuda else hidden))
            if len(self._waiting) >= WAIT_ROUNDS:
                self._sort()
            return
        self._sort()
        parts = torch.split_with_sizes(hidden, [s.end - s.start for s in spans])
        for seq, span, rows in zip(seqs, spans, parts, strict=True):
            self._add(seq, span, rows)

    def _sort(self) -> None:
        """Add the rows of waiting rounds to their contexts; rounds of the same sequences are stacked first."""
        rounds, self._waiting = self._waiting, []
        gone, self._gone = self._gone, set()
        # Consecutive rounds of the same sequences, each one token further than the one before.
        begins = ([(q.seq_id, span.start - i) for q, span in zip(*r[:2], strict=True)] for i, r in enumerate(rounds))
        for _, group in groupby(zip(begins, rounds, strict=True), lambda pair: pair[0]):
            same = [one for _, one in group]
            hidden = torch.stack([rows for _, _, rows in same])  # [rounds, B, F]
            for i, (seq, first, last) in enumerate(zip(same[0][0], same[0][1], same[-1][1], strict=True)):
                if seq.seq_id not in gone:
                    self._add(seq, Span(first.start, last.end), hidden[:, i])

    def _add(self, seq: Sequence, span: Span, rows: Tensor) -> None:
        context = self._sorted.get(seq.seq_id)
        if context is None:
            context = self._sorted[seq.seq_id] = Context(seq, span.start)
        context.add(span, rows)
        if context.end - context.start > self.limit:  # too long: no more drafts
            context.forget(context.end)
        while context.can_go_on and context.num_pending >= self.reading.max_rows and context.end < len(seq):
            waiting = 4 * rows.shape[1] * sum(c.num_hidden for c in self._sorted.values())  # bytes
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
        hidden = [c.take(n) for _, c, n in work]
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
        """A context with the number of tokens, at most wanted[b], that the head can draft now after each sequence.

        It maps indices of sequences that can draft. Long pending stretches of theirs are computed; inside, there are
        blocks for all certain rows and for num_nodes(b, tokens) nodes.
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
        yield {b: counts[b] for b in ready}
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
        if self._waiting:
            self._gone.add(seq.seq_id)
        context = self._sorted.pop(seq.seq_id, None)
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
