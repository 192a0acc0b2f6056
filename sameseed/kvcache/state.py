"""RecurrentStates: what recurrent layers keep of a sequence beside keys and values, in one slot per sequence.

A slot holds the state after a sequence's first n tokens (`Sequence.num_settled`), and a log of its latest rows, by
position. A pass first replays the logged rows after those n tokens, as far as they were kept, then takes its own rows.
It stores the state after the last token that cannot be taken back, and logs the rows behind it. So a draft costs one
read and one write of the state, whatever its length, and rejected rows leave no trace.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from sameseed.formats._memory import reserved
from sameseed.kvcache.blocks import MOST_UNSETTLED
from sameseed.ops._delta import StateLayer
from sameseed.request import Sequence

LOG_ROWS = MOST_UNSETTLED + 8  # of a slot; convolutions look back on at most 8 columns


class RecurrentStates:
    """The states of `num_slots` sequences. `shapes`: of each recurrent layer its state [H, K, D] and a row's width."""

    def __init__(self, shapes: Seq[tuple[tuple[int, ...], int]], num_slots: int, device: str = "cpu") -> None:
        self.num_slots = num_slots
        where = torch.device(device)
        self.layers = [
            StateLayer(
                reserved((num_slots, *state), torch.float32, where),
                reserved((num_slots, LOG_ROWS, row), torch.float32, where),
            )
            for state, row in shapes
        ]


def slot_bytes(shapes: Seq[tuple[tuple[int, ...], int]]) -> int:
    """Bytes of one slot over all recurrent layers."""
    return sum(4 * (torch.Size(state).numel() + LOG_ROWS * row) for state, row in shapes)


def settle(seq: Sequence, end: int, num_nodes: int) -> int:
    """How many tokens the stored state of `seq` will cover after a pass up to `end` and `num_nodes` draft nodes."""
    sure = end if seq.num_certain is None else min(end, seq.num_certain)
    return max(seq.num_settled, sure, end + num_nodes - MOST_UNSETTLED)
