"""Scheduler: which sequences run in the next pass, how many pending tokens of each, how many draft tokens.

Continuous batching (Yu et al., 2022) with chunked prefill (Agrawal et al., 2023) and one row budget. Pure Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from foretoken.kvcache.blocks import BlockManager
from foretoken.request import Sequence

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


class Scheduler:
    """First come, first served. Rows or blocks short: drafts are given up first, then the youngest is preempted.

    A preempted sequence loses its blocks and waits at the head of the queue; all its tokens are pending again.
    """

    def __init__(self, blocks: BlockManager, max_num_rows: int, max_num_seqs: int, max_model_len: int) -> None:
        self.blocks = blocks
        self.max_num_rows = max_num_rows
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        seq.context = self.max_model_len
        self.waiting.append(seq)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, finished or aborted, running or waiting; its blocks are free again."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.blocks.release(seq)

    def schedule(self, draft_lengths: DraftLengths) -> Plan:
        """The next pass. Every running sequence gets at least one row; what drafts may have comes last."""
        chunks = self._chunks()
        left = self.max_num_rows - sum(chunks.values())
        plan = [seq for seq in self.running if seq in chunks]
        left -= self._admit(plan, chunks, left)
        num_draft = self._drafts(plan, chunks, draft_lengths, left)
        return Plan(plan, [chunks[seq] for seq in plan], num_draft)

    def _chunks(self) -> dict[Sequence, int]:
        """Pending tokens of the running sequences, blocks reserved; preempts the youngest where blocks run out."""
        chunks: dict[Sequence, int] = {}
        left = self.max_num_rows - len(self.running)  # one row each, then more in order of arrival
        for seq in list(self.running):
            if seq not in self.running:
                continue  # preempted by an older one
            size = 1 + min(seq.num_pending - 1, left)
            while not self.blocks.reserve(seq, seq.num_cached + size):
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is seq:
                    break
            else:
                chunks[seq] = size
                left -= size - 1
        return chunks

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.blocks.release(seq)
        self.waiting.appendleft(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _admit(self, plan: list[Sequence], chunks: dict[Sequence, int], left: int) -> int:
        """Start waiting sequences while rows, places and blocks last; returns the rows used.

        A sequence starts only if all its tokens (and one more) fit into free blocks: no preemption at once.
        """
        used = 0
        while self.waiting and used < left and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if self.blocks.blocks_for(min(len(seq) + 1, self.max_model_len)) > self.blocks.num_free:
                break
            size = min(seq.num_pending, left - used)
            self.blocks.reserve(seq, size)
            self.waiting.popleft()
            self.running.append(seq)
            plan.append(seq)
            chunks[seq] = size
            used += size
        return used

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
