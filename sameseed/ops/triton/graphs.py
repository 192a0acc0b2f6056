"""Graphs: the launches of a small pass recorded once, on buffers that stay, and replayed by one call (CUDA graphs).

A graph serves all passes of its bucket: of up to so many rows of up to so many sequences, whose block tables are up to
so wide. Rows that a pass lacks belong to no sequence: they have slot -1, which nothing is stored at, and no query of
theirs is attended for. A row's bits do not depend on its company, so they do not tell.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sameseed.batch import MAX_NODES, Batch, Steps
from sameseed.ops.triton.buffers import Buffers

if TYPE_CHECKING:
    from sameseed.ops import Forward, Ops, Results

log = logging.getLogger("sameseed.ops")
MOST_ROWS = 256  # a larger pass computes for longer than its launches take
NARROWEST = 2048  # keys of the narrowest tables; each wider bucket has four times as many
MOST_GRAPHS = 128  # of a cache: the latest used
Replay = Callable[[], None]
Capture = Callable[[Callable[[], "Results"]], tuple[Replay, "Results"]]


@cache
def _pool(device: int) -> Any:
    """The memory of all graphs of a GPU: they run one after the other, and keep nothing but their results."""
    return torch.cuda.graph_pool_handle()


def on_cuda(run: Callable[[], Results]) -> tuple[Replay, Results]:
    """Record what `run` launches; nothing runs yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool(torch.cuda.current_device()), capture_error_mode="thread_local"):
        results = run()
    return graph.replay, results


def capture_for(device: torch.device) -> Capture | None:
    """How launches are recorded on a device; None: they are not."""
    return on_cuda if device.type == "cuda" else None


@dataclass
class Bucket:
    """Buffers, and once it is recorded, what replays a pass on them, and where its results are, if it keeps any."""

    buffers: Buffers
    replay: Replay | None = None
    results: Results | None = None


class Graphs:
    """A model's forward pass, by graphs where it is small, else op by op: on a GPU what PlanReplay is on the CPU.

    The first pass of a bucket runs op by op (kernels are compiled), and is recorded then. Logits of a pass stay
    until the model's next pass: all graphs leave them in one place. Choices stay until the next pass of the bucket;
    hidden states are the caller's. `inputs` of a pass are float32 [T, width] on the device.
    """

    def __init__(self, forward: Forward, ops: Ops) -> None:
        self._forward = forward
        self._ops = ops
        self._busy = threading.Lock()
        self._buckets: weakref.WeakKeyDictionary[Any, OrderedDict[Any, Bucket]] = weakref.WeakKeyDictionary()
        self._refused = False
        self._no_chains = False  # could a pass of a chain not be recorded?
        self._logits: Tensor | None = None  # float32 [MOST_ROWS, V] of the latest graph that ran

    def __call__(self, batch: Batch, cache: Any, captures: tuple[int, ...], *inputs: Tensor) -> Results:
        device = cache.layers[0].k.device
        capture = None if self._refused or not 0 < batch.num_rows <= MOST_ROWS else capture_for(device)
        made_here = batch.token_ids.device.type == "cpu" and all(
            len(x) <= batch.num_rows for x in (batch.num_pending, batch.logit_rows)
        )
        if batch.token_ids.device.type == "cpu":
            batch = batch.without_chains()
        # The buffers serve one pass at a time; another pass meanwhile computes op by op.
        if capture is None or not made_here or not self._busy.acquire(blocking=False):
            return self._forward(self._ops, batch, cache, captures, *inputs)
        try:
            return self._by_graph(capture, device, batch, cache, captures, inputs)
        finally:
            self._busy.release()

    def _by_graph(
        self,
        capture: Capture,
        device: torch.device,
        batch: Batch,
        cache: Any,
        captures: tuple[int, ...],
        inputs: Seq[Tensor],
    ) -> Results:
        bucket = self._bucket(device, batch, cache, captures, inputs)
        bucket.buffers.fill(batch, inputs)

        def run() -> Results:
            return self._forward(self._ops, bucket.buffers.batch, cache, captures, *bucket.buffers.inputs)

        if bucket.replay is None or bucket.results is None:
            logits, hidden, chosen = run()
            if self._logits is None:
                self._logits = logits.new_empty(MOST_ROWS, logits.shape[1])
            if not self._refused:
                self._record(bucket, capture, run)
        else:
            bucket.replay()
            logits, hidden, chosen = bucket.results
        count = len(batch.logit_rows)
        return (
            logits[:count],
            None if hidden is None or not captures else hidden[: batch.num_rows].clone(),
            None if chosen is None else chosen[..., :count],
        )

    def _record(self, bucket: Bucket, capture: Capture, run: Callable[[], Results]) -> None:
        """Make a bucket's graph; where that is refused, none is asked for again."""

        def recorded() -> Results:
            logits, hidden, chosen = run()
            assert self._logits is not None
            return self._logits[: len(logits)].copy_(logits), hidden, chosen

        try:
            bucket.replay, bucket.results = capture(recorded)
        except RuntimeError as error:
            self._refused = True
            log.warning(
                "no graph of a pass could be recorded (%s); passes run op by op, which is slower", _reason(error)
            )

    def chain(
        self, batch: Batch, steps: Steps, cache: Any, captures: tuple[int, ...], *inputs: Tensor
    ) -> Tensor | None:
        """The choices of the k passes of `steps`, of which `batch` is the first: int32 [k, 1 or 2, B] (`Ops.choose`).

        A graph of one pass ends with what the next one needs, its tokens and inputs, so it is replayed k times and the
        host makes and reads nothing in between. None where that cannot be; the passes may then run one by one.
        """
        rows, device = batch.num_rows, cache.layers[0].k.device
        small = rows <= MOST_ROWS and len(steps.slots) <= MAX_NODES
        capture = capture_for(device) if small and not (self._refused or self._no_chains) else None
        if capture is None or not self._busy.acquire(blocking=False):
            return None
        try:
            return self._by_one_graph(capture, device, batch.without_chains(), steps, cache, captures, inputs)
        except RuntimeError as error:
            self._no_chains = True
            log.warning("no graph of a chain could be recorded (%s); its passes come one by one", _reason(error))
            return None
        finally:
            self._busy.release()

    def _by_one_graph(
        self,
        capture: Capture,
        device: torch.device,
        batch: Batch,
        steps: Steps,
        cache: Any,
        captures: tuple[int, ...],
        inputs: Seq[Tensor],
    ) -> Tensor:
        bucket = self._bucket(device, batch, cache, captures, inputs, MAX_NODES)
        buffers = bucket.buffers

        def run() -> Results:
            buffers.take()
            logits, hidden, chosen = self._forward(self._ops, buffers.batch, cache, captures, *buffers.inputs)
            buffers.keep(hidden, chosen)
            return logits, hidden, chosen

        buffers.fill_steps(batch, inputs, steps)
        if bucket.replay is None:
            run()  # so that its kernels are compiled
            buffers.fill_steps(batch, inputs, steps)
            bucket.replay, _ = capture(run)
            buffers.fill_steps(batch, inputs, steps)
        for _ in steps.slots:
            bucket.replay()
        return buffers.choices[: len(steps.slots), :, : batch.num_rows].clone()

    def _bucket(
        self,
        device: torch.device,
        batch: Batch,
        cache: Any,
        captures: tuple[int, ...],
        inputs: Seq[Tensor],
        most_steps: int = 0,
    ) -> Bucket:
        """That of a batch, or of a chain of at most so many passes.

        Rows that are cut to a top-k or top-p are chosen for outside: the host launches for each.
        """
        draws = batch.draws if batch.draws is None or not (batch.draws.most or batch.draws.shares) else None
        page = cache.layers[0].k.shape[1]
        rows, seqs = (1 << (count - 1).bit_length() for count in (batch.num_rows, batch.num_seqs))
        keys = NARROWEST
        while keys < batch.block_tables.shape[1] * page:
            keys *= 4
        drawn = draws and (draws.sure,)
        widths = tuple(x.shape[1] for x in inputs)
        key = captures, rows, seqs, keys, drawn, widths, most_steps
        known = self._buckets.setdefault(cache, OrderedDict())
        if not captures and key not in known:  # to record costs more than to keep hidden states that nobody asked for
            key = next((k for k, own in known.items() if k[1:] == key[1:] and own.replay is not None), key)
        if key not in known:
            known[key] = Bucket(Buffers(rows, seqs, -(-keys // page), draws, widths, device, most_steps))
            if len(known) > MOST_GRAPHS:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]


def _reason(error: RuntimeError) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def replayer(forward: Forward, ops: Ops) -> Graphs:
    """`forward` by graphs, where the device has them."""
    return Graphs(forward, ops)
