"""Plan replay on the CPU: record the op calls of a forward pass once, replay them in one native call.

One plan serves passes of any number of rows up to its capacity, because every op gets its number of rows at run time. A
larger pass records a larger plan, which replaces the smaller one. Passes that a plan cannot record run op by op.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence as Seq
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.ops import _native_cache as cache_ops, _native_rows as row_ops, by_part
from sameseed.ops._layout import native
from sameseed.ops._rows import ExpertWeights, RowSource, Then, plain_rows
from sameseed.scheme import KVLayer, QuantTensor

with suppress(ImportError):  # cpu.py then says that the module is missing
    from sameseed import _native

if TYPE_CHECKING:
    from sameseed.ops import Ends, Forward, Grown, Ops

log = logging.getLogger("sameseed.ops")
SMALLEST_CAPACITY = 16  # rows


class NotRecordableError(Exception):
    """An op of the pass cannot be recorded; the message says which."""


class Pool:
    """Float buffers that return to the pool when the last tensor that uses their memory is gone.

    The pool keeps the latest `most_free` returned buffers. Without a bound it keeps all buffers, which a plan needs,
    because its steps write to them in every pass.
    """

    def __init__(self, most_free: int | None = None) -> None:
        self._free: list[np.ndarray[Any, Any]] = []
        self._most_free = most_free

    def take(self, *shape: int) -> Tensor:
        """A float32 tensor of this shape with undefined content."""
        size = math.prod(shape)
        fitting = [i for i, block in enumerate(self._free) if size <= block.size <= 2 * size + 1024]
        best = min(fitting, key=lambda i: self._free[i].size, default=None)
        block = torch.empty(size).numpy() if best is None else self._free.pop(best)
        lent = block[:size]  # stays alive as long as a tensor uses the memory
        weakref.finalize(lent, self._take_back, block)
        return torch.from_numpy(lent).view(shape)

    def _take_back(self, block: np.ndarray[Any, Any]) -> None:
        self._free.append(block)
        if self._most_free is not None and len(self._free) > self._most_free:
            del self._free[0]


Between = Callable[[Batch], None]  # a step that runs between two plans of a pass


class Recorder:
    """Provides the ops that a model calls. Each op adds a step to the plan and returns a buffer for its result.

    `parts`: one plan, or several plans with Python steps (`Between`) between them.
    """

    def __init__(self, pool: Pool) -> None:
        self.parts: list[_native.Plan | Between] = []
        self._pool = pool
        self._open()

    def _open(self) -> None:
        self._on = row_ops.Executor(_native.Plan(), self._pool.take)
        self.parts.append(self._on.calls)

    def __getattr__(self, op: str) -> Any:
        if op not in ("attention", "conv", "delta", "gate", "rope_store", "take"):
            raise NotRecordableError(f"the op {op}")

        def record(*args: Any) -> Tensor:
            for layer in args:
                if isinstance(layer, KVLayer) and layer.format not in cache_ops.KV_FORMATS:
                    raise NotRecordableError(f"a cache in {layer.format!r}")
            done: Tensor = getattr(cache_ops, op)(*args, on=self._on)
            return done

        return record

    def norm_add(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, factor: float = 1.0) -> Tensor:
        if not weight.is_contiguous():
            raise NotRecordableError("a norm that is no contiguous tensor")
        row_ops.check_fit("norm weight", weight.shape[0], x.shape[1])
        out = self._on.empty(*x.shape)
        where = {"x": x, "stride": x.stride(0), "width": x.shape[1], "weight": weight, "eps": eps, "out": out}
        added = {"residual": residual, "residual_stride": 0 if residual is None else residual.stride(0)}
        self._on.calls.norm(native(_native.Norm, **where, **added, factor=factor))
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.norm_add(x, weight, eps, None)

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        self._on.calls.cap(_native.Cap(cap=cap, width=logits.shape[1]))
        return logits

    def _served(self, w: QuantTensor, *vectors: Tensor | None) -> None:
        if not row_ops.serves(w):
            raise NotRecordableError(f"weights in {w.format!r} with group {w.group}")
        if w.activations in ("fp8", "outliers"):
            raise NotRecordableError(f"rows for {w.activations}")
        if any(v is not None and not v.is_contiguous() for v in vectors):
            # A contiguous copy would be freed before the plan runs.
            raise NotRecordableError("a bias or norm that is no contiguous tensor")

    def embedding(self, token_ids: Tensor, w: QuantTensor, scale: float = 1.0) -> Tensor:
        self._served(w)
        return row_ops.embedding(token_ids, w, scale, self._on)

    def product(
        self,
        rows: RowSource,
        w: QuantTensor | tuple[QuantTensor, ...],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        then: Then | None = None,
    ) -> Tensor:
        if isinstance(w, tuple):
            return self.beside([self.product(rows, p, b) for p, b in by_part(w, bias)])
        self._served(w, rows.norm, bias)
        if w.order is not None:
            rows = self._gathered(rows, w.order)
        return row_ops.product(rows, w, bias, residual, self._on)

    def _gathered(self, rows: RowSource, order: Tensor) -> RowSource:
        """Reorder the columns of rows, in a Python step between two plans."""
        if rows.row_ids is not None:
            raise NotRecordableError("a head whose columns are in another order")
        out = self._on.empty(rows.x.shape[0], len(order))

        def gather(batch: Batch) -> None:
            count = batch.num_rows
            x = rows._replace(x=rows.x[:count]).prepared(row_ops.rms_norm, row_ops.silu_mul, row_ops.gelu_mul)
            torch.index_select(x, 1, order, out=out[:count])

        self.parts.append(gather)
        self._open()
        return plain_rows(out)

    def experts(
        self, rows: RowSource, w: ExpertWeights, residual: Tensor | None = None, logits: Tensor | None = None
    ) -> Tensor:
        if rows.norm is not None and not rows.norm.is_contiguous():
            raise NotRecordableError("a norm that is no contiguous tensor")
        out = row_ops.experts(rows, w, residual, logits, self._on)
        if out is None:
            raise NotRecordableError(f"experts in {w.gate_up[0].format!r}")
        return out

    def beside(self, parts: Seq[Tensor]) -> Tensor:
        """Record steps that write several x [T, O] side by side."""
        out = self._on.empty(parts[0].shape[0], sum(x.shape[1] for x in parts))
        self._side_by_side(parts, out.shape[1], out.data_ptr())
        return out

    def capture(self, hidden: Seq[Tensor]) -> Tensor:
        """Record steps that write x [T, C] of each captured layer to its columns of the pass's hidden states."""
        total = sum(x.shape[1] for x in hidden)
        self._side_by_side(hidden, total, 0)
        return torch.empty(1, total)

    def _side_by_side(self, parts: Seq[Tensor], total: int, out: int) -> None:
        """Record copies of `parts` to adjacent columns at address `out`; 0: the hidden states of the pass."""
        column = 0
        for x in parts:
            width = x.shape[1]
            where = {"x": x, "stride": x.stride(0), "width": width, "column": column, "total": total, "out": out}
            self._on.calls.columns(native(_native.Columns, **where))
            column += width


class Recorded:
    """A recorded pass: its plans, their buffers, and the widths of its results."""

    def __init__(
        self, forward: Forward, cache: Any, captures: tuple[int, ...], capacity: int, widths: Seq[int] = ()
    ) -> None:
        """Record a pass. `widths`: of the inputs [T, width] besides the batch, which `run` copies to fixed buffers."""
        self.capacity = capacity
        self._buffers = Pool()  # owned by the plan, because its steps write here in every pass
        blank = torch.zeros(capacity, dtype=torch.int32)
        one = torch.zeros(1, dtype=torch.int32)
        batch = Batch(blank, blank, blank, torch.zeros(2, dtype=torch.int32), one, one, one[None], None, one)
        inputs = [self._buffers.take(capacity, width) for width in widths]
        recorder = Recorder(self._buffers)
        logits, hidden, _ = forward(recorder, batch, cache, captures, *inputs)
        self._parts = [part for part in recorder.parts if callable(part) or len(part)]
        self._inputs = [x.numpy() for x in inputs]
        self.logit_width = logits.shape[1]
        self.hidden_width = 0 if hidden is None else hidden.shape[1]

    @property
    def single(self) -> _native.Plan | None:
        """The plan, if the pass is exactly one plan; else None."""
        return self._parts[0] if len(self._parts) == 1 and not callable(self._parts[0]) else None

    @property
    def input(self) -> int:
        """The address at which steps read the first input."""
        return self._inputs[0].ctypes.data

    def run(self, batch: Batch, results: Pool, inputs: Seq[Tensor] = ()) -> tuple[Tensor, Tensor | None]:
        """Replay a pass; returns logits float32 [R, V] and captured hidden states float32 [T, ...] from `results`."""
        rows, num_logit_rows = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        logits = results.take(num_logit_rows, self.logit_width)
        hidden = results.take(rows, self.hidden_width) if self.hidden_width else None
        for buffer, x in zip(self._inputs, inputs, strict=True):
            buffer[:rows] = x.numpy()
        names = ("token_ids", "positions", "slots", "row_offsets", "kv_lens", "block_tables", "tree_mask", "logit_rows")
        this_pass = native(
            _native.Pass,
            rows=rows,
            num_seqs=batch.num_pending.shape[0],
            num_logit_rows=num_logit_rows,
            table_stride=batch.block_tables.shape[1],
            key_positions=batch.positions if batch.key_positions is None else batch.key_positions,
            logits=logits,
            hidden=hidden,
            states=batch.states,
            **{name: getattr(batch, name) for name in names},
        )
        for part in self._parts:
            if callable(part):
                part(batch)
            else:
                part.run(this_pass)
        return logits, hidden


class PlanReplay:
    """Runs a model's forward pass through plans: one plan for each cache and choice of captured layers.

    The `inputs` of a pass, each float32 [T, width], are passed to `forward` after its other arguments. Their widths
    must not change.
    """

    def __init__(self, forward: Forward, ops: Ops) -> None:
        self._forward = forward
        self._ops = ops
        self._results = Pool(most_free=8)
        self._busy = threading.Lock()
        self._plans: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Recorded | None]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(
        self, batch: Batch, cache: Any, captures: tuple[int, ...], *inputs: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        # The buffers serve one pass at a time. A concurrent pass runs op by op.
        if not _laid_out(batch) or not self._busy.acquire(blocking=False):
            return self._forward(self._ops, batch, cache, captures, *inputs)
        try:
            recorded = self.recorded(batch.num_rows, cache, captures, [x.shape[1] for x in inputs])
            if recorded is not None:
                return *recorded.run(batch, self._results, inputs), None
        finally:
            self._busy.release()
        return self._forward(self._ops, batch, cache, captures, *inputs)

    def grow(
        self,
        trees: Seq[_native.GrowingTree],
        num_rows: int,
        logits: Tensor,
        features: Tensor | None,
        cache: Any,
        captures: tuple[int, ...],
        ends: Ends | None,
    ) -> Grown | None:
        """Grow draft trees in one native call, one pass per level (csrc/grow.h).

        Returns tokens, parents and path probabilities of each tree. logits [B, V] and features [B, C] (None if passes
        take no features) belong to each tree's last known row. A level has at most `num_rows` rows. `ends(paths)`, for
        chains only, is called before each pass. Returns None if a pass is not exactly one plan, or buffers are in use.
        """
        if not self._busy.acquire(blocking=False):
            return None
        try:
            widths = [] if features is None else [features.shape[1]]
            recorded = self.recorded(num_rows, cache, captures, widths)
            plan = None if recorded is None else recorded.single
            if recorded is None or plan is None:
                return None
            results = [self._results.take(num_rows, n) for n in (recorded.logit_width, *widths)]
            inputs = (None, None, None) if features is None else (features, recorded.input, results[1])
            passes = native(
                _native.TreePasses,
                vocab=recorded.logit_width,
                width=sum(widths),
                block_size=cache.block_size,
                logits=logits,
                level_logits=results[0],
                **dict(zip(("features", "input", "level_features"), inputs)),
            )
            return _native.grow_trees(plan, passes, trees, ends)
        finally:
            self._busy.release()

    def recorded(self, rows: int, cache: Any, captures: tuple[int, ...], widths: Seq[int] = ()) -> Recorded | None:
        """The recorded pass for this many rows, recorded first if necessary; None if it cannot be recorded."""
        plans = self._plans.setdefault(cache, {})
        known = plans.get(captures)
        if captures in plans and (known is None or rows <= known.capacity):
            return known
        capacity = max(SMALLEST_CAPACITY, 1 << (rows - 1).bit_length())
        try:
            plans[captures] = Recorded(self._forward, cache, captures, capacity, widths)
        except NotRecordableError as reason:
            log.info("no plan replay: the pass uses %s", reason)
            plans[captures] = None
        return plans[captures]


def _laid_out(batch: Batch) -> bool:
    """Whether the batch is as build_batch makes it: contiguous int32 (mask: int64) tensors of matching lengths."""
    b, rows, num_seqs = batch, len(batch.token_ids), len(batch.num_pending)
    parts: list[tuple[Tensor | None, int]] = [(x, rows) for x in (b.token_ids, b.positions, b.key_positions, b.slots)]
    parts += [(b.row_offsets, num_seqs + 1), (b.kv_lens, num_seqs), (b.block_tables, num_seqs), (b.tree_mask, rows)]
    parts.append((b.logit_rows, len(b.logit_rows)))
    return all(
        len(x) == size and x.is_contiguous() and x.dtype is (torch.int64 if x is b.tree_mask else torch.int32)
        for x, size in parts
        if x is not None
    )
