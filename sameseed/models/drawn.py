"""Tokens that a model drew where its logits are, and that the host has not read: chains written without a wait."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sameseed import devices
from sameseed.batch import UNKNOWN, int_tensors


@dataclass(frozen=True)
class LateNodes:
    """Chains of draft nodes, counts[b] of each sequence, whose tokens int32 [N] are on the device."""

    counts: Seq[int]
    tokens: Tensor

    def nodes(self, b: int) -> tuple[list[int], list[int]]:
        """Tokens, none of them known, and parents of sequence b."""
        count = self.counts[b]
        return [UNKNOWN] * count, list(range(-1, count - 1))


class Drawn:
    """Chains of counts[b] >= 1 tokens of each sequence, drawn step after step by those that have not so many yet."""

    def __init__(self, counts: Seq[int]) -> None:
        self.counts = list(counts)
        self._steps: list[Tensor] = []

    def running(self, step: int) -> list[int]:
        """The sequences that draw a token in a step."""
        return [b for b, count in enumerate(self.counts) if count > step]

    def add(self, chosen: Tensor) -> None:
        """The next step's choices: int32 [R], or [2, R] with confidences (`Ops.choose`)."""
        self._steps.append(chosen.clone().view(-1, chosen.shape[-1]))  # a pass writes over the choices of the last one

    def going(self, rows: Tensor, step: int) -> Tensor:
        """Of rows [R, ...] of those running in the step before, those of the ones running in this one."""
        before, now = self.running(step - 1), self.running(step)
        if before == now:
            return rows
        (index,) = int_tensors(([before.index(b) for b in now],), rows.device)
        return rows.index_select(0, index)

    def last(self, step: int) -> Tensor:
        """Tokens int32 [R] of the step before, after which those running in this one go on."""
        return self.going(self._steps[step - 1][0], step)

    @cached_property
    def numbers(self) -> Tensor:
        """Tokens, and below them confidences where they were asked for: int32 [1 or 2, N], sequence after sequence."""
        every = torch.cat(self._steps, dim=1)
        drawn = [(b, step) for step in range(len(self._steps)) for b in self.running(step)]
        order = sorted(range(len(drawn)), key=drawn.__getitem__)
        if order == list(range(len(order))):
            return every
        return every.index_select(1, int_tensors((order,), every.device)[0])

    def split(self, numbers: Seq[Seq[int]]) -> list[list[tuple[int, float]]]:
        """`numbers` as the host has read them: each sequence's tokens, and how sure they are (1: nobody asked)."""
        tokens, *bits = numbers
        sure = np.array(bits[0], np.int32).view(np.float32).tolist() if bits else [1.0] * len(tokens)
        pairs, found, end = list(zip(tokens, sure, strict=True)), [], 0
        for count in self.counts:
            found.append(pairs[end : end + count])
            end += count
        return found

    def read(self) -> list[list[tuple[int, float]]]:
        """What was drawn (`split`); the host waits for it."""
        return self.split(devices.read(self.numbers))
