"""Scheduler: decides which sequences run in the next pass, with how many pending tokens and draft tokens each.

Continuous batching (Yu et al., 2022) with chunked prefill (Agrawal et al., 2023). Pure Python.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from itertools import chain

from sameseed.kvcache.blocks import BlockManager
from sameseed.request import Sequence

KEPT = 4  # a prompt leaves every fourth row to sequences behind it, so that short prompts need not wait for long ones
LEAST_ROWS = 8  # of prompts in a pass, whatever they take: so few take little more than one, see c(8) of `bench`
PATIENCE = 32  # after being passed over so often by later sequences of higher priority, a sequence goes first
DraftLengths = Callable[[Seq[Sequence], int, int], list[int]]  # sequences, rows of known tokens, room for draft tokens
PromptSeconds = Callable[[int, int], float]  # rows of a prompt, cached tokens before them -> what they add to a pass


@dataclass(frozen=True)
class Plan:
    """One pass: num_pending[b] known tokens and at most num_draft[b] draft tokens of seqs[b]."""

    seqs: list[Sequence]
    num_pending: list[int]
    num_draft: list[int]

    @property
    def num_rows(self) -> int:
        return sum(self.num_pending) + sum(self.num_draft)


@dataclass
class _Room:
    """What a pass has left for prompts: rows, and seconds."""

    rows: int
    seconds: float
    cost: PromptSeconds

    def fitting(self, wanted: int, num_cached: int, crowded: bool = False) -> int:
        """How many of the `wanted` rows of a prompt fit; `crowded`: other sequences are behind it."""
        rows, seconds = self.rows, self.seconds
        if crowded:
            rows, seconds = rows - rows // KEPT, seconds * (1 - 1 / KEPT)
        sizes = range(1, min(wanted, rows) + 1)
        return (
            len(sizes) if seconds == math.inf else bisect_right(sizes, seconds, key=lambda n: self.cost(n, num_cached))
        )

    def take(self, num_rows: int, num_cached: int) -> None:
        self.rows -= num_rows
        if self.seconds < math.inf:
            self.seconds = max(0.0, self.seconds - self.cost(num_rows, num_cached))


@dataclass
class _Standing:
    """A sequence's place in the queue. The lowest `importance` goes first: passed over often, then priority."""

    priority: int
    arrival: int
    num_started: int = 0  # the number of its first start; 0: not started yet
    num_passed: int = 0  # how often a later sequence of higher priority went before it

    @property
    def importance(self) -> tuple[bool, int]:
        may_wait = self.num_passed < PATIENCE
        return (may_wait, self.priority if may_wait else 0)

    def passes(self, other: _Standing) -> bool:
        """Does this sequence arrive later than the other, but go before it by priority?"""
        return other.arrival < self.arrival and other.priority > self.priority


class Scheduler:
    """Schedules by priority, then fairly between owners, then first come, first served.

    If rows or blocks run short, drafts are given up first. Then the sequence of lowest priority that started last is
    preempted: it waits, with all its tokens pending again. No sequence starves: after being passed over `PATIENCE`
    times it goes first, one at a time. An owner with no running sequence waits for at most one start of each other
    owner.

    Prompts delay a decoding sequence by at most its `max_delay` in a pass, or the time of `LEAST_ROWS` rows if that is
    longer.
    """

    def __init__(self, blocks: BlockManager, max_num_rows: int, max_num_seqs: int, max_model_len: int) -> None:
        self.blocks = blocks
        self.max_num_rows = max_num_rows
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.waiting: list[Sequence] = []  # by importance, then by arrival
        self.running: list[Sequence] = []  # by importance, then by their first start
        self.num_preemptions = 0
        self._standing: dict[Sequence, _Standing] = {}
        self._last_start: dict[str, float] = {}  # the number of the last start, by owner of a sequence here
        self._num_starts = 0
        self._num_added = 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        seq.context = self.max_model_len
        self._standing[seq] = _Standing(seq.priority, self._num_added)
        self._num_added += 1
        self._last_start.setdefault(seq.owner, self._num_starts - 0.5)  # a new owner goes before the latest one
        insort(self.waiting, seq, key=self._by_arrival)

    def _by_arrival(self, seq: Sequence) -> tuple[bool, int, int]:
        standing = self._standing[seq]
        return (*standing.importance, standing.arrival)

    def _by_start(self, seq: Sequence) -> tuple[bool, int, int]:
        standing = self._standing[seq]
        return (*standing.importance, standing.num_started)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence, finished or aborted, running or waiting, and free its blocks."""
        if self._standing.pop(seq, None) is not None:
            (self.running if seq in self.running else self.waiting).remove(seq)
            if all(other.owner != seq.owner for other in self._standing):
                del self._last_start[seq.owner]
        self.blocks.release(seq)

    def schedule(self, draft_lengths: DraftLengths, prompt_seconds: PromptSeconds = lambda *rows: 0.0) -> Plan:
        """Plan the next pass. Every running sequence gets at least one row; drafts get the rows that are left."""
        room = self._room(prompt_seconds)
        chunks = self._chunks(room)
        self._admit(chunks, room)
        # What prompts left to others, and no sequence took, goes to the first prompts that were cut.
        cut = {seq for seq, size in chunks.items() if len(seq.token_ids) - seq.num_cached > size}
        for seq in self.running if cut else ():
            if seq in cut:
                end = seq.num_cached + chunks[seq]
                more = room.fitting(min(len(seq) - end, self.blocks.reservable(seq) - end), end)
                self.blocks.reserve(seq, end + more)
                room.take(more, end)
                chunks[seq] += more
        plan = [seq for seq in self.running if seq in chunks]
        num_draft = self._drafts(plan, chunks, draft_lengths, room.rows)
        return Plan(plan, [chunks[seq] for seq in plan], num_draft)

    def _room(self, cost: PromptSeconds) -> _Room:
        """The room for prompts, beside one row of each running sequence."""
        decoding = (seq.max_delay for seq in self.running if seq.num_output > 0 and seq.num_pending == 1)
        seconds = min(decoding, default=math.inf)
        prompt = next(chain((seq for seq in self.running if seq.num_pending > 1), self.waiting), None)
        if prompt is not None and seconds < math.inf:
            seconds = max(seconds, cost(LEAST_ROWS, prompt.num_cached))
        return _Room(self.max_num_rows - len(self.running), seconds, cost)

    def _chunks(self, room: _Room) -> dict[Sequence, int]:
        """Pending tokens per running sequence, with blocks reserved. Preempts the last sequence if blocks run out."""
        chunks: dict[Sequence, int] = {}
        for seq in list(self.running):
            if seq not in self.running:
                continue  # preempted for an earlier one
            more = 0  # one row each, then more in order
            if seq.num_pending > 1:
                self._share(seq)  # prefix blocks that others have computed since
                crowded = seq is not self.running[-1] or bool(self.waiting)
                more = room.fitting(seq.num_pending - 1, seq.num_cached, crowded)
            while not self.blocks.reserve(seq, seq.num_cached + 1 + more):
                last = self.running[-1]
                self._preempt(last)
                room.rows += 1
                if last is seq:
                    break
            else:
                chunks[seq] = 1 + more
                room.take(more, seq.num_cached)
        return chunks

    def _share(self, seq: Sequence) -> None:
        """Let a sequence with many pending tokens share blocks from the prefix cache."""
        if seq.num_pending > self.blocks.block_size:
            saved = self.blocks.adopt(seq)
            if not seq.num_preemptions:  # a preempted one finds its own blocks: no hit
                seq.num_shared += saved
                self.blocks.prefixes.num_hits += saved

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.blocks.release(seq)
        insort(self.waiting, seq, key=self._by_arrival)
        mine, running = self._standing[seq], (self._standing[other] for other in self.running)
        by = next((standing for standing in running if standing.passes(mine)), None)
        if by is not None:
            self._count_pass(by)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _admit(self, chunks: dict[Sequence, int], room: _Room) -> None:
        """Start waiting sequences that fit whole into free blocks with one more token: none is preempted at once."""
        while self.waiting and room.fitting(1, 0) and len(self.running) < self.max_num_seqs:
            seq = self._next()
            if not self.blocks.fits(seq, min(len(seq) + 1, self.max_model_len)):
                break
            if not seq.num_preemptions:
                self.blocks.prefixes.num_queries += len(seq)
            self._share(seq)
            size = max(1, room.fitting(seq.num_pending, seq.num_cached, len(self.waiting) > 1))
            self.blocks.reserve(seq, seq.num_cached + size)
            self.waiting.remove(seq)
            standing = self._standing[seq]
            self._num_starts += 1
            self._last_start[seq.owner] = self._num_starts
            standing.num_started = standing.num_started or self._num_starts
            insort(self.running, seq, key=self._by_start)
            self._count_pass(standing)
            chunks[seq] = size
            room.take(size, seq.num_cached)

    def _next(self) -> Sequence:
        """Of the waiting sequences with the first one's priority, the first of the owner with the fewest running.

        Among several such owners, the one whose last start is longest ago.
        """
        importance = self._standing[self.waiting[0]].importance
        may_wait = importance[0]
        firsts: dict[str, Sequence] = {}
        for seq in self.waiting if may_wait else self.waiting[:1]:
            if seq.owner not in firsts:
                if self._standing[seq].importance != importance:
                    break
                firsts[seq.owner] = seq
                if len(firsts) == len(self._last_start):
                    break
        running = Counter(seq.owner for seq in self.running)
        return firsts[min(firsts, key=lambda owner: (running[owner], self._last_start[owner]))]

    def _count_pass(self, by: _Standing) -> None:
        """Count `by` only for the earliest waiting sequence it passes: else many would reach the limit together."""
        waiting = (self._standing[seq] for seq in self.waiting)
        passed = [standing for standing in waiting if by.passes(standing) and standing.importance[0]]
        if passed:
            first = min(passed, key=lambda standing: standing.arrival)
            first.num_passed += 1
            if not first.importance[0]:
                self.waiting.sort(key=self._by_arrival)

    def _drafts(self, plan: list[Sequence], chunks: dict[Sequence, int], lengths: DraftLengths, left: int) -> list[int]:
        """Draft tokens for sequences whose pending tokens are all in the pass, but none for a first or last token.

        Rows and blocks limit the number of nodes; the sequence limits their depth (`draft_depth`).
        """
        able = [b for b, seq in enumerate(plan) if seq.num_pending <= chunks[seq]]
        able = [b for b in able if plan[b].num_output > 0 or plan[b].num_scripted]
        num_draft = [0] * len(plan)
        wanted = lengths([plan[b] for b in able], sum(chunks.values()), left)
        for b, k in zip(able, wanted, strict=True) if any(wanted) else ():
            seq = plan[b]
            room = self.blocks.reservable(seq) - len(seq)
            k = max(0, min(k, room, left)) if seq.draft_depth else 0
            self.blocks.reserve(seq, len(seq) + k)
            num_draft[b] = k
            left -= k
        return num_draft
