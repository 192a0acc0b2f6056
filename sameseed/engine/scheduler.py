"""Scheduler: which sequences run in the next pass, how many pending tokens of each, how many draft tokens.

Continuous batching (Yu et al., 2022) with chunked prefill (Agrawal et al., 2023) and one row budget. Pure Python.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from sameseed.engine.owners import Owners
from sameseed.kvcache.blocks import BlockManager
from sameseed.request import Sequence

KEPT = 4  # a prompt leaves one row in so many to those behind it, so that a short one need not wait for a long one
PATIENCE = 32  # later ones that may go before a sequence, by their priority, until it goes before all of them
DraftLengths = Callable[[Seq[Sequence], int, int], list[int]]  # sequences, rows of known tokens, room for draft tokens


@dataclass(frozen=True)
class Plan:
    """One pass: num_pending[b] known tokens and at most num_draft[b] draft tokens of seqs[b]."""

    seqs: list[Sequence]
    num_pending: list[int]
    num_draft: list[int]

    @property
    def num_rows(self) -> int:
        return sum(self.num_pending) + sum(self.num_draft)


def _part(wanted: int, left: int, crowded: bool) -> int:
    """Rows of a prompt that could use so many; `crowded`: there are others behind it."""
    return min(wanted, left - left // KEPT if crowded else left)


@dataclass
class _Turn:
    """When it is a sequence's turn. Of lower `importance` goes first; whom patience puts first has no priority."""

    priority: int
    arrival: int
    num_started: int = 0  # its number among those that have started; a later start changes nothing
    num_passed: int = 0  # times that a later one went before it

    @property
    def importance(self) -> tuple[bool, int]:
        patient = self.num_passed < PATIENCE
        return (patient, self.priority if patient else 0)

    def passes(self, other: _Turn) -> bool:
        """Does it, later and more important, go before the other?"""
        return other.arrival < self.arrival and other.priority > self.priority


class Scheduler:
    """By priority, then by turns of owners, each first come, first served.

    Rows or blocks short: drafts go first, then the least important, of these the last that started. It loses its blocks
    and waits for its turn; all its tokens are pending again. Nobody starves: priorities are overruled by patience, one
    at a time (after `PATIENCE` more important ones that came later went first), who started first is never preempted
    but by the more important, and an owner with nothing running is behind no other for more than one turn.
    """

    def __init__(self, blocks: BlockManager, max_num_rows: int, max_num_seqs: int, max_model_len: int) -> None:
        self.blocks = blocks
        self.max_num_rows = max_num_rows
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.waiting: list[Sequence] = []  # by importance, then by arrival
        self.running: list[Sequence] = []  # by importance, then by their first start
        self.num_preemptions = 0
        self._turns: dict[Sequence, _Turn] = {}
        self._owners = Owners()
        self._num_started = 0
        self._num_added = 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        seq.context = self.max_model_len
        self._turns[seq] = _Turn(seq.priority, self._num_added)
        self._num_added += 1
        self._owners.enter(seq.owner)
        insort(self.waiting, seq, key=self._by_arrival)

    def _by_arrival(self, seq: Sequence) -> tuple[bool, int, int]:
        turn = self._turns[seq]
        return (*turn.importance, turn.arrival)

    def _by_start(self, seq: Sequence) -> tuple[bool, int, int]:
        turn = self._turns[seq]
        return (*turn.importance, turn.num_started)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, finished or aborted, running or waiting; its blocks are free again."""
        if self._turns.pop(seq, None) is not None:
            ran = seq in self.running
            (self.running if ran else self.waiting).remove(seq)
            self._owners.leave(seq.owner, ran)
        self.blocks.release(seq)

    def schedule(self, draft_lengths: DraftLengths) -> Plan:
        """The next pass. Every running sequence gets at least one row; what drafts may have comes last."""
        chunks = self._chunks()
        left = self.max_num_rows - sum(chunks.values())
        left -= self._admit(chunks, left)
        left -= self._fill(chunks, left)
        plan = [seq for seq in self.running if seq in chunks]
        num_draft = self._drafts(plan, chunks, draft_lengths, left)
        return Plan(plan, [chunks[seq] for seq in plan], num_draft)

    def _chunks(self) -> dict[Sequence, int]:
        """Pending tokens of the running sequences, blocks reserved; preempts the last where blocks run out."""
        chunks: dict[Sequence, int] = {}
        left = self.max_num_rows - len(self.running)  # one row each, then more in order
        for seq in list(self.running):
            if seq not in self.running:
                continue  # preempted by one before it
            size = 1
            if seq.num_pending > 1:
                self._share(seq)  # what others have computed since
                size += _part(seq.num_pending - 1, left, seq is not self.running[-1] or bool(self.waiting))
            while not self.blocks.reserve(seq, seq.num_cached + size):
                last = self.running[-1]
                self._preempt(last)
                if last is seq:
                    break
            else:
                chunks[seq] = size
                left -= size - 1
        return chunks

    def _share(self, seq: Sequence) -> None:
        """Let a sequence with much to compute take what is known already."""
        if seq.num_pending > self.blocks.block_size:
            saved = self.blocks.adopt(seq)
            if not seq.num_preemptions:  # what it had itself once is no hit
                seq.num_shared += saved
                self.blocks.prefixes.hits.num_hits += saved

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.blocks.release(seq)
        self._owners.stop(seq.owner)
        insort(self.waiting, seq, key=self._by_arrival)
        mine, running = self._turns[seq], (self._turns[other] for other in self.running)
        by = next((turn for turn in running if turn.passes(mine)), None)
        if by is not None:
            self._overrule(by)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _admit(self, chunks: dict[Sequence, int], left: int) -> int:
        """Start waiting sequences while rows, places and blocks last; returns the rows used.

        A sequence starts only if all its tokens (and one more) fit into free blocks: no preemption at once.
        """
        used = 0
        while self.waiting and used < left and len(self.running) < self.max_num_seqs:
            seq = self._next()
            if not self.blocks.fits(seq, min(len(seq) + 1, self.max_model_len)):
                break
            if not seq.num_preemptions:
                self.blocks.prefixes.hits.num_queries += len(seq)
            self._share(seq)
            size = _part(seq.num_pending, left - used, len(self.waiting) > 1)
            self.blocks.reserve(seq, seq.num_cached + size)
            self.waiting.remove(seq)
            self._start(seq)
            chunks[seq] = size
            used += size
        return used

    def _next(self) -> Sequence:
        """Of the first in rank and its equals, the first of the owner who has the fewest running.

        Where several have as few: of the one whose last turn is longest ago. Whom patience puts first has no equals.
        """
        importance = self._turns[self.waiting[0]].importance
        patient = importance[0]
        firsts: dict[str, Sequence] = {}
        for seq in self.waiting if patient else self.waiting[:1]:
            if seq.owner not in firsts:
                if self._turns[seq].importance != importance:
                    break
                firsts[seq.owner] = seq
                if len(firsts) == len(self._owners.num_waiting):
                    break
        return firsts[min(firsts, key=self._owners.turn)]

    def _fill(self, chunks: dict[Sequence, int], left: int) -> int:
        """Rows that were kept and that nobody took go to the first prompts; returns how many."""
        used = 0
        cut = {seq for seq, size in chunks.items() if len(seq.token_ids) - seq.num_cached > size}
        for seq in self.running if cut else ():
            if seq in cut:
                end = seq.num_cached + chunks[seq]
                more = min(len(seq) - end, left - used, self.blocks.reservable(seq) - end)
                self.blocks.reserve(seq, end + more)
                chunks[seq] += more
                used += more
        return used

    def _start(self, seq: Sequence) -> None:
        """It runs from now on."""
        turn = self._turns[seq]
        if not turn.num_started:
            self._num_started += 1
            turn.num_started = self._num_started
        insort(self.running, seq, key=self._by_start)
        self._owners.start(seq.owner)
        self._overrule(turn)

    def _overrule(self, by: _Turn) -> None:
        """Of those who wait and whom it passes, the first to come grows less patient.

        Only the first: else a flood of them would lose patience together and go before everybody.
        """
        waiting = (self._turns[seq] for seq in self.waiting)
        passed = [turn for turn in waiting if by.passes(turn) and turn.importance[0]]
        if passed:
            first = min(passed, key=lambda turn: turn.arrival)
            first.num_passed += 1
            if not first.importance[0]:
                self.waiting.sort(key=self._by_arrival)

    def _drafts(self, plan: list[Sequence], chunks: dict[Sequence, int], lengths: DraftLengths, left: int) -> list[int]:
        """Draft tokens for sequences whose pending tokens are all in the pass and that have begun to write.

        (The first token comes from the prompt's own pass, before any drafting.) None for a sequence's last token. How
        many nodes a draft may have, rows and blocks decide; how deep it may be, the sequence (`draft_depth`).
        """
        able = [b for b, seq in enumerate(plan) if seq.num_pending <= chunks[seq]]
        able = [b for b in able if plan[b].num_output > 0 or plan[b].num_scripted]
        num_draft = [0] * len(plan)
        wanted = lengths([plan[b] for b in able], sum(chunks.values()), left)
        for b, k in zip(able, wanted, strict=True):
            seq = plan[b]
            room = self.blocks.reservable(seq) - len(seq)
            k = max(0, min(k, room, left)) if seq.draft_depth else 0
            self.blocks.reserve(seq, len(seq) + k)
            num_draft[b] = k
            left -= k
        return num_draft
