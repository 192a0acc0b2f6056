"""ModelRunner: a model with its cache. Target, draft and middle model are all one of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from sameseed import devices
from sameseed.batch import GREEDY, UNKNOWN, Batch, Draw, Draws, Rows, ancestor_masks, build_batch, int_tensors
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.cache import KVCache
from sameseed.models.drawn import Drawn, LateNodes, steps_after
from sameseed.models.llama import Llama
from sameseed.ops import Ends, Grown
from sameseed.request import Sequence


class Nodes(Protocol):
    """What a pass needs of a draft: tokens and parents of the nodes of each sequence."""

    def nodes(self, b: int) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True)
class Output:
    """logits float32 [R, V]; hidden float32 [T, ...] of the captured layers; row_offsets[b]: sequence b's first row.

    `chosen` int32 [R], on the device: the tokens after the rows of sequences that may be drawn (`Drawer`), where the
    backend chose them.
    """

    logits: Tensor
    hidden: Tensor | None
    row_offsets: list[int]
    wants_logits: list[bool]
    chosen: Tensor | None = None

    @cached_property
    def choices(self) -> list[int] | None:
        """`chosen`, as the host reads it: it waits for the pass."""
        return None if self.chosen is None else devices.read(self.chosen)

    def read_with(self, numbers: Tensor) -> list[list[int]]:
        """`numbers` int32 [m, n] of the device, as the host reads them; `choices` as well, by the same wait."""
        if self.chosen is None:
            return devices.read(numbers)
        flat = devices.read(torch.cat([self.chosen, numbers.view(-1)]))
        count, (m, n) = len(self.chosen), numbers.shape
        vars(self)["choices"] = flat[:count]
        return [flat[count + i * n : count + (i + 1) * n] for i in range(m)]

    def narrowed(self, before: Seq[int], after: Seq[int]) -> Output:
        """This, where of the before[b] nodes of each sequence, a chain, only the first after[b] are looked at."""
        if list(before) == list(after):
            return self
        keep: list[int] = []
        row = 0
        for b, wants in enumerate(self.wants_logits):
            if wants:
                keep += range(row, row + 1 + after[b])
                row += 1 + before[b]
        rows = int_tensors((keep,), self.logits.device)[0]
        chosen = None if self.chosen is None else self.chosen.index_select(0, rows)
        out = replace(self, logits=self.logits.index_select(0, rows), chosen=chosen)
        if self.choices is not None:
            vars(out)["choices"] = [self.choices[i] for i in keep]
        return out


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
        self._no_choices = False  # has it turned out that the device makes none?

    def beside(
        self,
        model: Llama | None = None,
        captures: tuple[int, ...] = (),
        unseen: Callable[[Sequence], tuple[int, int]] = lambda seq: (0, 0),
    ) -> ModelRunner:
        """Another runner on the same cache and blocks: of the same model, or of one with the same cached rows."""
        return ModelRunner(model or self.model, self.cache, captures, self.blocks, unseen)

    @property
    def takes_late(self) -> bool:
        """May a pass take tokens that are on the device only, and choose such?"""
        return self.model.ops.chooses and not self._no_choices

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
        `drawer` a backend that can chooses tokens beside its logits. Who reads the tokens of `LateNodes` waits for the
        pass as well; else its end is waited for here.
        """
        late = draft.tokens if isinstance(draft, LateNodes) else None
        batch, offsets, wants = self._batch(seqs, draft, num_pending, drawer, late=late)
        logits, hidden, chosen = self.model.run(batch, self.cache, self.captures if captured else ())
        out = Output(logits, hidden, offsets, wants, chosen)
        # Who times a pass times all of it: its end is waited for, by reading its choices if there are any.
        if late is None:
            if out.chosen is None:
                devices.wait(self.model.device)
            else:
                _ = out.choices
        return out

    def draw(self, seqs: Seq[Sequence], counts: Seq[int], drawer: Drawer, sure: bool = False) -> Drawn | None:
        """Write counts[b] >= 1 tokens after each sequence, a pass a token, without reading any: they end in UNKNOWN.

        Blocks must be reserved already. `sure`: also how sure the choices are. None, and nothing is written, where the
        device does not choose, or may not for one of these sequences.
        """
        if not self.takes_late or any(drawer(seq, 0) is None for seq in seqs):
            return None
        drawn = Drawn(counts)
        for step in range(max(counts)):
            some = [seqs[b] for b in drawn.running(step)]
            late = drawn.last(step) if step else None
            batch, *_ = self._batch(some, None, [s.num_pending for s in some], drawer, sure, late)
            if step == 1 and self._draw_rest(some, drawn, batch, drawer):
                break
            _, _, chosen = self.model.run(batch, self.cache)
            if chosen is None:
                self._no_choices = True
                return None
            drawn.add(chosen)
            for seq in some:
                seq.num_cached = len(seq)
                seq.token_ids.append(UNKNOWN)
        return drawn

    def grow(self, trees: Seq[Any], seqs: Seq[Sequence], logits: Tensor, ends: Ends | None) -> Grown | None:
        """A chain after each sequence, whose rows are all cached, from the logits [B, V] there (`Llama.grow`).

        None, and nothing is written, where the backend does not do that, or a sequence is not seen whole.
        """
        if any(self.unseen(s) != (0, 0) for s in seqs):
            return None
        return self.model.grow(trees, len(seqs), logits, self.cache, ends)

    def _draw_rest(self, seqs: Seq[Sequence], drawn: Drawn, batch: Batch, drawer: Drawer) -> bool:
        """All passes of a chain from `batch` on, the second, where the device goes through them by itself; did it?

        What the rows do not attend to must be the same in all of them.
        """
        counts, starts = [drawn.counts[b] - 1 for b in drawn.running(1)], [s.num_cached for s in seqs]
        unseen = [self.unseen(s) for s in seqs]
        for seq, count in zip(seqs, counts, strict=True):
            seq.num_cached += count - 1
        moved = [self.unseen(s) for s in seqs] != unseen
        for seq, start in zip(seqs, starts, strict=True):
            seq.num_cached = start
        blocks, size = [s.blocks for s in seqs], self.cache.block_size
        steps = steps_after(batch, blocks, starts, counts, size, lambda b, step: drawer(seqs[b], step))
        chosen = None if steps is None or moved else self.model.chain(batch, steps, self.cache)
        if chosen is None:
            return False
        drawn.add_rest(chosen)
        for seq, count in zip(seqs, counts, strict=True):
            seq.token_ids += [UNKNOWN] * count
            seq.num_cached = len(seq) - 1
        return True

    def _batch(
        self,
        seqs: Seq[Sequence],
        draft: Nodes | None,
        num_pending: Seq[int],
        drawer: Drawer | None,
        sure: bool = False,
        late: Tensor | None = None,
    ) -> tuple[Batch, list[int], list[bool]]:
        """A pass: its batch, where each sequence's rows begin, and whose logits are wanted.

        `late` int32 [n]: tokens of its rows whose tokens are UNKNOWN.
        """
        rows: list[Rows] = []
        offsets = [0]
        drawn: list[Draw | None] = []
        draws = drawer is not None and self.model.ops.chooses
        for b, seq in enumerate(seqs):
            nodes, parents = ([], []) if draft is None else draft.nodes(b)
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
            batch = replace(batch, draws=Draws.of([GREEDY if d is None else d for d in drawn], sure))
        if late is not None:  # which may be another model's, of more tokens, or FAILED: any guess will do
            batch = batch.with_late(late.clamp(0, self.model.config.vocab_size - 1))
        return batch, offsets, [r.wants_logits for r in rows]

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
