"""Walks rounds of batches over replayed texts, for all bootstrap samples together, and sums up their seconds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from sameseed.plan.acceptance import Ints, Replay
from sameseed.plan.cost import Bools, CostModel, Floats


@dataclass(frozen=True, eq=False)
class Totals:
    """Sums over all rounds of each sample, float64 [samples]; sample 0 is the workload itself. Times are in seconds."""

    target: Floats
    draft: Floats
    gap: Floats
    prefill: Floats
    tokens: Floats
    rounds: Floats
    rows: Floats
    decided: Floats  # rounds, counted once for each sequence in them


def walk(replay: Replay, cost: CostModel, table: Seq[int], orders: Ints, batch_size: int, refill: bool) -> Totals:
    """Walk all rounds of all samples, and sum up their seconds.

    `orders` [samples, n]: texts in the order in which they come. `table`: draft sizes by number of running sequences.
    `refill`: waiting texts take the places of those that end.
    """
    columns = np.array([-1, *(replay.column(k) if k else -1 for k in table)])
    alone = batch_size == 1  # then a text's time does not depend on the texts before it
    batches = _Batches(replay, np.arange(replay.num_texts)[:, None] if alone else orders, batch_size, refill)
    drafted = bool((columns >= 0).any())
    sums = np.zeros((len(batches.sample), 7))
    sums[:, 3] = cost.prefill(batches.enter(), drafted)
    while batches.compress():
        if refill:
            sums[batches.live, 3] += cost.prefill(batches.enter(), drafted)
        active = batches.at < batches.end
        b = active.sum(axis=1)
        column = columns[b]
        context = (batches.known * active).sum(axis=1) / np.maximum(b, 1)
        accepted, nodes, steps = batches.events(active, column)
        rows = b + nodes
        here = np.zeros((len(b), 7))
        here[:, 0] = cost.target(rows.astype(float), b.astype(float), context)
        for level, own in enumerate(steps):
            deepest = own.max(axis=1).astype(float)
            if deepest.any():
                who = np.maximum((own > 0).sum(axis=1), 1).astype(float)
                here[:, 1] += np.where(deepest > 0, cost.draft(level, deepest, who, context), 0.0)
        here[:, 2] = cost.gap(b.astype(float), column >= 0)
        here[:, 4], here[:, 5], here[:, 6] = b > 0, rows, b
        sums[batches.live] += here * (b > 0)[:, None]
        batches.go_on(accepted)
    if alone:
        of = sums[orders].sum(axis=1)
    else:
        of = np.zeros((len(orders), 7))
        np.add.at(of, batches.sample, sums)
    tokens = replay.num_tokens[orders].sum(axis=1).astype(float)
    return Totals(of[:, 0], of[:, 1], of[:, 2], of[:, 3], tokens, of[:, 4], of[:, 5], of[:, 6])


class _Batches:
    """G batches of B places each; `live`: indices of those that still run.

    The arrays `at`, `end` and `known` [live, B] belong to these: position, end and known tokens of the text in each
    place.
    """

    def __init__(self, replay: Replay, orders: Ints, batch_size: int, refill: bool) -> None:
        num_samples, n = orders.shape
        self.replay = replay
        width = n if refill else -(-n // batch_size) * batch_size
        padded = np.full((num_samples, width), -1)
        padded[:, :n] = orders
        groups = 1 if refill else width // batch_size
        self.queue = padded.reshape(num_samples * groups, -1)  # [G, texts of each]
        self.sample = np.repeat(np.arange(num_samples), groups)
        self.live = np.arange(len(self.queue))
        self.next = np.zeros(len(self.queue), np.int64)  # index in the queue
        self.at, self.end, self.known = (np.zeros((len(self.queue), batch_size), np.int64) for _ in range(3))
        # Flat arrays, indexed by position * size + column: one index finds all that a round needs.
        self.size = len(replay.sizes)
        self.flat = [a.reshape(-1) for a in (replay.accepted, replay.nodes)]
        self.flat += [np.ascontiguousarray(replay.steps[:, :, d]).reshape(-1) for d in range(len(replay.levels))]

    def enter(self) -> Floats:
        """Let waiting texts take free places; returns the prompt tokens that enter, by batch."""
        queue, offsets = self.queue[self.live], self.replay.offsets
        free = self.at >= self.end
        wanted = self.next[:, None] + np.cumsum(free, axis=1) - 1
        able = free & (wanted < queue.shape[1])
        text = np.take_along_axis(queue, np.minimum(wanted, queue.shape[1] - 1), axis=1)
        self.next += able.sum(axis=1)
        new = able & (text >= 0)
        text = text[new]
        prompts = np.zeros(new.shape)
        prompts[new] = self.replay.num_prompts[text]
        self.at[new], self.end[new] = offsets[text], offsets[text + 1]
        self.known[new] = self.replay.num_prompts[text] + 1
        found: Floats = prompts.sum(axis=1)
        return found

    def compress(self) -> bool:
        """Drop batches that have ended; is any left?"""
        more = (self.at < self.end).any(axis=1) | (self.next < self.queue.shape[1])
        if not more.all():
            self.live = self.live[more]
            self.at, self.end, self.known = self.at[more], self.end[more], self.known[more]
            self.next = self.next[more]
        return bool(len(self.live))

    def events(self, active: Bools, column: Ints) -> tuple[Ints, Ints, list[Ints]]:
        """Accepted tokens [live, B], nodes [live], and steps [live, B] of each level, in the current round."""
        if (column < 0).all() or not active.any():
            return np.zeros(active.shape, np.int64), np.zeros(len(active), np.int64), []
        drafts = active & (column >= 0)[:, None]
        where = np.where(drafts, self.at * self.size + column[:, None], 0)
        accepted, nodes, *steps = (np.where(drafts, a[where], 0).astype(np.int64) for a in self.flat)
        return accepted, nodes.sum(axis=1), steps

    def go_on(self, accepted: Ints) -> None:
        """Advance every text by its accepted tokens and one more."""
        self.at += accepted + 1
        self.known += accepted + 1
