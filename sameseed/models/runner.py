"""ModelRunner: a model with its KV cache. The target, a draft model and a middle model each run in a ModelRunner."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sameseed import devices
from sameseed.batch import GREEDY, UNKNOWN, Batch, Draw, Draws, Rows, ancestor_masks, build_batch, int_tensors
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.cache import KVCache
from sameseed.kvcache.state import settle
from sameseed.models.decoder import Decoder
from sameseed.models.drawn import Drawn, LateNodes, steps_after
from sameseed.ops import Ends, Grown, Results
from sameseed.request import Sequence


class Nodes(Protocol):
    """The part of a draft that a pass needs: tokens and parents of each sequence's draft nodes."""

    def nodes(self, b: int) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True)
class Output:
    """The result of a pass: logits float32 [R, V], hidden float32 [T, ...] of captured layers, first row per sequence.

    `chosen` int32 [R], on the device: the tokens that the backend drew after the rows (`Drawer`), or None where it
    drew none; `choices`: the same on the host, once it has read them. `wants_logits[b]`: whether sequence b has rows
    among the logits.
    """

    logits: Tensor
    hidden: Tensor | None
    row_offsets: list[int]
    wants_logits: list[bool]
    chosen: Tensor | None = None
    choices: list[int] | None = None

    def read(self) -> Output:
        """Wait for the pass; the output with its choices on the host."""
        if self.chosen is None:
            devices.wait(self.logits.device)
            return self
        return replace(self, choices=devices.read(self.chosen))

    def read_with(self, numbers: Tensor) -> tuple[list[list[int]], Output]:
        """`numbers` int32 [m, n] of the device on the host, and `read`, in the same transfer."""
        if self.chosen is None:
            return devices.read(numbers), self
        flat = devices.read(torch.cat([self.chosen, numbers.view(-1)]))
        count, (m, n) = len(self.chosen), numbers.shape
        rows = [flat[count + i * n : count + (i + 1) * n] for i in range(m)]
        return rows, replace(self, choices=flat[:count])

    def narrowed(self, before: Seq[int], after: Seq[int]) -> Output:
        """The output for shorter chains: of the before[b] draft nodes of a sequence, only the first after[b] stay."""
        if list(before) == list(after):
            return self
        keep: list[int] = []
        row = 0
        for b, wants in enumerate(self.wants_logits):
            if wants:
                keep += range(row, row + 1 + after[b])
                row += 1 + before[b]
        (rows,) = int_tensors((keep,), self.logits.device)
        chosen = None if self.chosen is None else self.chosen.index_select(0, rows)
        choices = None if self.choices is None else [self.choices[i] for i in keep]
        return replace(self, logits=self.logits.index_select(0, rows), chosen=chosen, choices=choices)


# (sequence, number of draft tokens behind its own) -> how the next token is drawn; None: the host needs the logits.
Drawer = Callable[[Sequence, int], Draw | None]


class ModelRunner:
    """Runs the rows of sequences through a model. `captures`: layers whose hidden states `forward` keeps.

    `unseen(seq)`: cached blocks first .. end of a sequence that its rows do not attend to. The default is none; only a
    model whose tokens are verified by another one may leave blocks out.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        captures: tuple[int, ...] = (),
        blocks: BlockManager | None = None,
        unseen: Callable[[Sequence], tuple[int, int]] = lambda seq: (0, 0),
    ) -> None:
        """`blocks`: the manager of the cache's blocks, if another runner shares the cache."""
        self.model = model
        self.cache = cache
        slots = 0 if cache.states is None else cache.states.num_slots
        self.blocks = blocks or BlockManager(cache.num_blocks, cache.block_size, num_slots=slots)
        self.captures = captures
        self.unseen = unseen
        self._no_choices = False  # set once a pass returned no choices: the device cannot draw tokens

    def beside(
        self,
        model: Decoder | None = None,
        captures: tuple[int, ...] = (),
        unseen: Callable[[Sequence], tuple[int, int]] = lambda seq: (0, 0),
    ) -> ModelRunner:
        """Another runner on the same cache and blocks, for this model or for one with the same cached rows."""
        return ModelRunner(model or self.model, self.cache, captures, self.blocks, unseen)

    @property
    def takes_late(self) -> bool:
        """Whether a pass can read and choose tokens that are only on the device, not yet on the host."""
        return self.model.ops.chooses and not self._no_choices

    def forward(
        self,
        seqs: Seq[Sequence],
        draft: Nodes,
        num_pending: Seq[int],
        captured: bool = True,
        drawer: Drawer | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Output:
        """Run one pass: the first num_pending[b] pending tokens of each sequence, then its draft nodes.

        Logits are computed for sequences whose pending tokens are all in the pass; only these may have draft nodes.
        Blocks for the rows must be reserved already. `captured` false: no hidden states are kept, whatever `captures`
        says. With a `drawer`, a backend that chooses tokens does so beside its logits. The call waits for the end of
        the pass, except with `LateNodes`: their tokens are read later, and reading them waits for the pass.
        `meanwhile` is called before the wait: work of the host while a GPU computes.
        """
        late = draft.tokens if isinstance(draft, LateNodes) else None
        batch, offsets, wants = self._batch(seqs, draft, num_pending, drawer, late=late)
        logits, hidden, chosen = self._run(seqs, batch, self.captures if captured else ())
        out = Output(logits, hidden, offsets, wants, chosen)
        meanwhile()
        return out.read() if late is None else out  # callers measure the whole time of a pass

    def draw(self, seqs: Seq[Sequence], counts: Seq[int], drawer: Drawer, sure: bool = False) -> Drawn | None:
        """Draw counts[b] >= 1 tokens after each sequence, one pass per token, without reading them on the host.

        UNKNOWN is appended to the sequences for each token. Blocks must be reserved already. `sure`: also compute the
        confidence of each token. Returns None, and changes nothing, where the device does not choose tokens, or must
        not for one of these sequences.
        """
        if not self.takes_late or any(drawer(seq, 0) is None for seq in seqs):
            return None
        drawn = Drawn(counts)
        for step in range(max(counts)):
            some = [seqs[b] for b in drawn.running(step)]
            late = drawn.last(step) if step else None
            batch, *_ = self._batch(some, None, [s.num_pending for s in some], drawer, sure, late)
            if step == 1 and self.cache.states is None and self._draw_rest(some, drawn, batch, drawer):
                break
            _, _, chosen = self._run(some, batch)
            if chosen is None:
                self._no_choices = True
                return None
            drawn.add(chosen)
            for seq in some:
                seq.num_cached = len(seq)
                seq.token_ids.append(UNKNOWN)
        return drawn

    def grow(self, trees: Seq[Any], seqs: Seq[Sequence], logits: Tensor, ends: Ends | None) -> Grown | None:
        """Grow a chain after each sequence, whose rows are all cached, from its last logits [B, V] (`Runnable.grow`).

        Returns None, and writes nothing, where the backend cannot do this, or a sequence has unseen blocks.
        """
        if self.cache.states is not None or any(self.unseen(s) != (0, 0) for s in seqs):
            return None
        ids = self.model.token_ids
        own = logits if ids is None else logits.index_select(1, ids)  # of the LM head's rows
        return self.model.grow(trees, len(seqs), own, None, self.cache, (), ends)

    def _draw_rest(self, seqs: Seq[Sequence], drawn: Drawn, batch: Batch, drawer: Drawer) -> bool:
        """Run the second pass of a chain (`batch`) and all later ones in one call, if the device can. Returns whether.

        The unseen blocks must be the same in all these passes.
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
        chosen = None if steps is None or moved else self.model.chain(batch, steps, self.cache, ())
        if chosen is None:
            return False
        drawn.add_rest(chosen)
        for seq, count in zip(seqs, counts, strict=True):
            seq.token_ids += [UNKNOWN] * count
            seq.num_cached = len(seq) - 1
        return True

    def _run(self, seqs: Seq[Sequence], batch: Batch, captures: tuple[int, ...] = ()) -> Results:
        """`Decoder.run`; then the sequences' states cover what the batch says."""
        if self.cache.states is not None:
            self.cache.states.copy(self.blocks.kept.copies)
        try:
            results = self.model.run(batch, self.cache, captures)
        except BaseException:  # a part of the layers may have stored new states
            if batch.states is not None:
                for seq in seqs:
                    self.blocks.release(seq)
            raise
        if batch.states is not None:
            for seq, settled in zip(seqs, batch.states[2].tolist(), strict=True):
                seq.num_settled = settled
        return results

    def _batch(
        self,
        seqs: Seq[Sequence],
        draft: Nodes | None,
        num_pending: Seq[int],
        drawer: Drawer | None,
        sure: bool = False,
        late: Tensor | None = None,
    ) -> tuple[Batch, list[int], list[bool]]:
        """Build the batch of a pass; also the first row of each sequence, and whether its logits are wanted.

        `late` int32 [n], on the device: the tokens of the rows that are UNKNOWN on the host.
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
            state = None if self.cache.states is None else settle(seq, end, len(nodes), self.blocks)
            rows.append(Rows(pending, seq.num_cached, nodes, parents, seq.blocks, complete, unseen, state))
            offsets.append(offsets[-1] + num_pending[b] + len(nodes))
            if draws and drawer is not None and complete:
                drawn += [drawer(seq, depth) for depth in (0, *(d + 1 for d in ancestor_masks(parents)[1]))]
        batch = build_batch(rows, self.cache.block_size)
        if any(d is not None for d in drawn):
            batch = replace(batch, draws=Draws.of([GREEDY if d is None else d for d in drawn], sure))
        if late is not None:  # ids of a model with a larger vocabulary, or FAILED: replaced by any valid token
            batch = batch.with_late(late.clamp(0, self.model.config.vocab_size - 1))
        return batch, offsets, [r.wants_logits for r in rows]

    def commit(self, seqs: Seq[Sequence], num_pending: Seq[int], nodes: Seq[Seq[int]], output: Output) -> Tensor | None:
        """Keep the KV cache rows of pending tokens and accepted nodes of each sequence, drop those of rejected nodes.

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
        if hidden is None or len(kept) == len(hidden):  # all rows are kept, in order
            kept = []
        if not src and not kept:
            return hidden
        moved, to, rows = int_tensors((src, dst, kept), self.model.device)
        if src:
            self.model.ops.move_all(self.cache.stacks, moved, to)
        if hidden is None or not kept:
            return hidden
        if hidden.device.type == "cpu":  # with NumPy: waiting threads of PyTorch would slow the next pass down
            return torch.from_numpy(hidden.numpy()[rows.numpy()])
        return hidden.index_select(0, rows)

    def truncate(self, seq: Sequence, length: int) -> None:
        self.blocks.rewind(seq, length)

    def _slot(self, seq: Sequence, index: int) -> int:
        size = self.cache.block_size
        return seq.blocks[index // size] * size + index % size
