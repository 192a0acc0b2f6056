"""ModelRunner: a model with its cache. Target, draft and middle model are all one of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sameseed import devices
from sameseed.batch import GREEDY, Draw, Draws, Rows, ancestor_masks, build_batch, int_tensors
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.cache import KVCache
from sameseed.models.llama import Llama
from sameseed.request import Sequence


class Nodes(Protocol):
    """What a pass needs of a draft: tokens and parents of the nodes of each sequence."""

    def nodes(self, b: int) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True)
class Output:
    """logits float32 [R, V]; hidden float32 [T, ...] of the captured layers; row_offsets[b]: sequence b's first row.

    `choices` [R]: the tokens after the rows of sequences that may be drawn (`Drawer`), where the backend chose them.
    """

    logits: Tensor
    hidden: Tensor | None
    row_offsets: list[int]
    wants_logits: list[bool]
    choices: list[int] | None = None


# How the token is drawn that many drafted tokens after a sequence's own; None where its logits are wanted instead.
Drawer = Callable[[Sequence, int], Draw | None]


class ModelRunner:
    """Runs the rows of sequences through a model. `captures`: layers whose hidden states `forward` keeps.

    `unseen(seq)`: blocks first .. end of a sequence, all cached, that its rows do not attend to; none for a model whose
    text counts.
    """

    def __init__(
        self,
        model: Llama,
        cache: KVCache,
        captures: tuple[int, ...] = (),
        blocks: BlockManager | None = None,
        unseen: Callable[[Sequence], tuple[int, int]] = lambda seq: (0, 0),
    ) -> None:
        """`blocks`: who gives out the cache's blocks, where another runner shares it."""
        self.model = model
        self.cache = cache
        self.blocks = blocks or BlockManager(cache.num_blocks, cache.block_size)
        self.captures = captures
        self.unseen = unseen

    def beside(
        self,
        model: Llama | None = None,
        captures: tuple[int, ...] = (),
        unseen: Callable[[Sequence], tuple[int, int]] = lambda seq: (0, 0),
    ) -> ModelRunner:
        """Another runner on the same cache and blocks: of the same model, or of one with the same cached rows."""
        return ModelRunner(model or self.model, self.cache, captures, self.blocks, unseen)

    def forward(
        self,
        seqs: Seq[Sequence],
        draft: Nodes,
        num_pending: Seq[int],
        captured: bool = True,
        drawer: Drawer | None = None,
    ) -> Output:
        """One pass: the first num_pending[b] pending tokens of each sequence, then its draft nodes.

        Logits come for sequences whose pending tokens are all in the pass; only these may have nodes. Blocks for the
        rows must be reserved already. `captured` false: no hidden states are kept, whatever `captures` says. With a
        `drawer` a backend that can chooses tokens beside its logits.
        """
        rows: list[Rows] = []
        offsets = [0]
        drawn: list[Draw | None] = []
        draws = drawer is not None and self.model.ops.chooses
        for b, seq in enumerate(seqs):
            nodes, parents = draft.nodes(b)
            end = seq.num_cached + num_pending[b]
            complete = end == len(seq)
            assert complete or not nodes, "a draft needs all pending tokens in the pass"
            pending, unseen = seq.token_ids[seq.num_cached : end], self.unseen(seq)
            rows.append(Rows(pending, seq.num_cached, nodes, parents, seq.blocks, complete, unseen))
            offsets.append(offsets[-1] + num_pending[b] + len(nodes))
            if draws and drawer is not None and complete:
                drawn += [drawer(seq, depth) for depth in (0, *(d + 1 for d in ancestor_masks(parents)[1]))]
        batch = build_batch(rows, self.cache.block_size)
        if any(d is not None for d in drawn):
            batch = replace(batch, draws=Draws.of([GREEDY if d is None else d for d in drawn]))
        logits, hidden, chosen = self.model.run(batch, self.cache, self.captures if captured else ())
        # Who times a pass times all of it: its end is waited for, by reading its choices if there are any.
        choices: list[int] | None = None if chosen is None else chosen.tolist()
        if choices is None:
            devices.wait(self.model.device)
        return Output(logits, hidden, offsets, [r.wants_logits for r in rows], choices)

    def commit(self, seqs: Seq[Sequence], num_pending: Seq[int], nodes: Seq[Seq[int]], output: Output) -> Tensor | None:
        """Keep the pending rows and the accepted nodes' rows of each sequence, drop the other nodes'.

        Returns the hidden states of the kept rows, sequence after sequence, or None if nothing is captured.
        """
        src: list[int] = []
        dst: list[int] = []
        kept: list[int] = []
        for b, seq in enumerate(seqs):
            known = seq.num_cached + num_pending[b]
            for place, node in enumerate(nodes[b]):
                if node != place:  # a node's place is after its ancestors', so rows only move down
                    src.append(self._slot(seq, known + node))
                    dst.append(self._slot(seq, known + place))
            seq.num_cached = known + len(nodes[b])
            if output.hidden is not None:
                first = output.row_offsets[b]
                kept += range(first, first + num_pending[b])
                kept += [first + num_pending[b] + n for n in nodes[b]]
        hidden = output.hidden
        if hidden is None or len(kept) == len(hidden):  # in order, so that is all of them
            kept = []
        if not src and not kept:
            return hidden
        moved, to, rows = int_tensors((src, dst, kept), self.model.device)
        if src:
            self.model.ops.move_all(self.cache.layers, self.cache.stacked, moved, to)
        if hidden is None or not kept:
            return hidden
        if hidden.device.type == "cpu":  # by NumPy: threads of PyTorch that wait for more would slow the next pass down
            return torch.from_numpy(hidden.numpy()[rows.numpy()])
        return hidden.index_select(0, rows)

    def truncate(self, seq: Sequence, length: int) -> None:
        self.blocks.rewind(seq, length)

    def _slot(self, seq: Sequence, index: int) -> int:
        size = self.cache.block_size
        return seq.blocks[index // size] * size + index % size
