"""Tokens that were drawn on the device and not yet read by the host: chains drafted without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sameseed import devices
from sameseed.batch import UNKNOWN, Batch, Draw, Steps, int_tensors, slots_of


@dataclass(frozen=True)
class LateNodes:
    """Chains of draft nodes, counts[b] of each sequence, whose tokens int32 [N] are on the device."""

    counts: Seq[int]
    tokens: Tensor

    def nodes(self, b: int) -> tuple[list[int], list[int]]:
        """Tokens (all UNKNOWN) and parents of the draft nodes of sequence b."""
        count = self.counts[b]
        return [UNKNOWN] * count, list(range(-1, count - 1))


class Drawn:
    """Chains of counts[b] >= 1 tokens per sequence, drawn step by step; a step covers the sequences not yet done."""

    def __init__(self, counts: Seq[int]) -> None:
        self.counts = list(counts)
        self._steps: list[Tensor] = []
        self._rows: list[list[int]] = []  # per step: the sequence of each choice

    def running(self, step: int) -> list[int]:
        """The sequences that draw a token in a step."""
        return [b for b, count in enumerate(self.counts) if count > step]

    def add(self, chosen: Tensor) -> None:
        """Add the choices of the next step: int32 [R], or [2, R] with confidences (`Ops.choose`)."""
        self._rows.append(self.running(len(self._steps)))
        self._steps.append(chosen.clone().view(-1, chosen.shape[-1]))  # cloned: the next pass reuses the buffer

    def add_rest(self, chosen: Tensor) -> None:
        """Add the choices of all steps after the first: int32 [k, 1 or 2, R] for the sequences of the second step."""
        self._rows += [self.running(1)] * len(chosen)
        self._steps += chosen.unbind()

    def going(self, rows: Tensor, step: int) -> Tensor:
        """Select from rows [R, ...], one per sequence of the previous step, those of the sequences in this step."""
        before, now = self.running(step - 1), self.running(step)
        if before == now:
            return rows
        (index,) = int_tensors(([before.index(b) for b in now],), rows.device)
        return rows.index_select(0, index)

    def last(self, step: int) -> Tensor:
        """Tokens int32 [R] of the previous step, for the sequences that draw in this step."""
        return self.going(self._steps[step - 1][0], step)

    @cached_property
    def numbers(self) -> Tensor:
        """Row 0: tokens; row 1: confidences, if requested. int32 [1 or 2, N], sequence after sequence."""
        every = torch.cat(self._steps, dim=1)
        drawn = [(b, step) for step, rows in enumerate(self._rows) for b in rows]
        order = sorted((i for i, (b, step) in enumerate(drawn) if step < self.counts[b]), key=drawn.__getitem__)
        if order == list(range(len(drawn))):
            return every
        return every.index_select(1, int_tensors((order,), every.device)[0])

    def split(self, numbers: Seq[Seq[int]]) -> list[list[tuple[int, float]]]:
        """Split `numbers`, as read by the host, into (token, confidence) per sequence; 1 if none was requested."""
        tokens, *bits = numbers
        sure = np.array(bits[0], np.int32).view(np.float32).tolist() if bits else [1.0] * len(tokens)
        pairs, found, end = list(zip(tokens, sure, strict=True)), [], 0
        for count in self.counts:
            found.append(pairs[end : end + count])
            end += count
        return found

    def read(self) -> list[list[tuple[int, float]]]:
        """Wait for the device and return what was drawn, as `split` does."""
        return self.split(devices.read(self.numbers))


def steps_after(
    batch: Batch,
    blocks: Seq[Seq[int]],
    starts: Seq[int],
    counts: Seq[int],
    block_size: int,
    draw: Callable[[int, int], Draw | None],
) -> Steps | None:
    """Slots and noise keys for all passes of chains of counts[b] >= 1 rows after the starts[b] rows of each sequence.

    `batch` is the first of these passes; draw(b, step): how the token after a row is drawn. None where only one pass
    is left, or where tokens are drawn with top-k or top-p: then each pass must be run separately.
    """
    draws, most = batch.draws, max(counts)
    if most < 2 or draws is None or draws.most or draws.shares:
        return None
    slots = np.full((most, len(counts)), -1, np.int32)
    keys = np.zeros((most, len(counts)), np.int64)
    for b, (own, start, count) in enumerate(zip(blocks, starts, counts, strict=True)):
        drawn = [draw(b, step) for step in range(count)]
        slots[:count, b] = slots_of(own, start, start + count, block_size)
        keys[:count, b] = np.array([0 if d is None else d.key for d in drawn], np.uint64).view(np.int64)
    return Steps(slots, keys)
