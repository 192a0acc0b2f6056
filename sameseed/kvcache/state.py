"""RecurrentStates: what recurrent layers keep of a sequence beside keys and values, in one slot per sequence.

A slot holds the state after a sequence's first n tokens (`Sequence.num_settled`), and a log of its latest rows, by
position. A pass first replays the logged rows that were kept, then takes its own. It stores the state after the last
token that cannot be taken back, and logs the rows behind it. So a draft costs one read and one write of the state,
whatever its length, and rejected rows leave no trace.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from sameseed.formats._memory import reserved
from sameseed.kvcache.blocks import MOST_UNSETTLED, BlockManager
from sameseed.ops._rows import StateLayer
from sameseed.request import Sequence

LOG_ROWS = MOST_UNSETTLED + 8  # of a slot; convolutions look back on at most 8 columns


class RecurrentStates:
    """The states of `num_slots` sequences, and room for as many that the prefix cache keeps.

    `shapes`: of each recurrent layer its state [H, K, D] and a row's width.
    """

    def __init__(self, shapes: Seq[tuple[tuple[int, ...], int]], num_slots: int, device: str = "cpu") -> None:
        self.num_slots = num_slots
        where = torch.device(device)
        self.layers = [
            StateLayer(
                reserved((2 * num_slots, *state), torch.float32, where),
                reserved((2 * num_slots, LOG_ROWS, row), torch.float32, where),
            )
            for state, row in shapes
        ]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Make the copies from slot to slot (`KeptStates`), in their order, and empty the list."""
        for source, to in copies:
            for part in (part for layer in self.layers for part in (layer.state, layer.log)):
                part[to].copy_(part[source])
        copies.clear()


def state_bytes(shapes: Seq[tuple[tuple[int, ...], int]], num_seqs: int = 1, keeps: bool = True) -> int:
    """Bytes of the states of some sequences over all recurrent layers; `keeps`: the prefix cache is on."""
    slot = sum(4 * (torch.Size(state).numel() + LOG_ROWS * row) for state, row in shapes)
    return num_seqs * (2 if keeps else 1) * slot


def settle(seq: Sequence, end: int, num_nodes: int, blocks: BlockManager) -> tuple[int, int, int]:
    """The slot of `seq`, and the tokens that its stored state covers before and after a pass (`Batch.states`).

    The pass goes up to token `end`, and `num_nodes` draft nodes. The state then covers all tokens that are sure, or
    those up to a block's end whose state the prefix cache keeps.
    """
    sure = end if seq.num_certain is None else min(end, seq.num_certain)
    least = max(seq.num_settled, end + num_nodes - MOST_UNSETTLED)
    ends = [n for n in blocks.kept_ends(seq, sure) if n > seq.num_settled and n >= least]
    return seq.slot, seq.num_settled, max(ends, default=max(sure, least))
