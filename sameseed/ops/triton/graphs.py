"""CUDA graphs: the launches of a small pass are recorded once, on fixed buffers, and replayed by one call.

A graph serves all passes of its bucket. A bucket has a maximum number of rows, of sequences and of columns of the block
tables. Missing rows of a pass belong to no sequence: they have slot -1, where nothing is stored, and attention skips
them. They do not change the other rows, because kernels are row-invariant.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sameseed.batch import MAX_NODES, Batch, Steps
from sameseed.ops.triton import guard
from sameseed.ops.triton.buffers import Buffers

if TYPE_CHECKING:
    from sameseed.ops import Forward, Ops, Results

log = logging.getLogger("sameseed.ops")
MOST_ROWS = 256  # larger passes compute longer than their launches take, so they need no graph
NARROWEST = 2048  # keys that the narrowest block tables hold; each wider bucket holds four times as many
MOST_GRAPHS = 128  # most buckets per cache; the least recently used is dropped
Replay = Callable[[], None]
Capture = Callable[[Callable[[], "Results"]], tuple[Replay, "Results"]]


@cache
def _place(device: torch.device) -> tuple[Any, torch.cuda.Stream]:
    """The memory pool and the stream that all graphs of a GPU share.

    The graphs run one after the other and keep only their results. PyTorch's own stream for recording belongs to the
    first GPU that recorded something; on another GPU it would record nothing.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.graph_pool_handle(), stream


def on_cuda(device: torch.device, run: Callable[[], Results]) -> tuple[Replay, Results]:
    """Record the launches of `run` on a GPU without running them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        pool, stream = _place(device)
        before, known = torch.cuda.current_stream(), guard.num_launches
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                results = run()
        except Exception:
            torch.cuda.set_stream(before)  # a recording that failed leaves its own stream as the current one
            _place.cache_clear()
            raise
    count, guard.num_launches = guard.num_launches - known, known  # recorded for later: they do not count yet

    def replay() -> None:
        guard.num_launches += count
        with torch.cuda.device(device):
            graph.replay()

    return replay, results


def capture_for(device: torch.device) -> Capture | None:
    """The function that records launches on a device; None if launches are not recorded there."""
    return partial(on_cuda, device) if device.type == "cuda" else None


@dataclass
class Bucket:
    """The buffers of a graph. Once it is recorded: the call that replays it, and the tensors of its results, if any."""

    buffers: Buffers
    replay: Replay | None = None
    results: Results | None = None


class Graphs:
    """Runs a model's forward pass through graphs if it is small, else op by op. The GPU counterpart of PlanReplay.

    The first pass of a bucket runs op by op, which compiles the kernels, and is then recorded. The logits of a pass are
    valid until the model's next pass, because all graphs write them to the same buffer. Choices are valid until the
    next pass of the same bucket. Hidden states are copied for the caller. `inputs` of a pass are float32 [T, width] on
    the device.
    """

    def __init__(self, forward: Forward, ops: Ops) -> None:
        self._forward = forward
        self._ops = ops
        self._busy = threading.Lock()
        self._buckets: weakref.WeakKeyDictionary[Any, OrderedDict[Any, Bucket]] = weakref.WeakKeyDictionary()
        self._refused = False
        self._no_chains = False  # whether recording a pass of a chain has failed
        self._logits: Tensor | None = None  # float32 [MOST_ROWS, V]: logits of the latest graph that ran

    def __call__(self, batch: Batch, cache: Any, captures: tuple[int, ...], *inputs: Tensor) -> Results:
        small = 0 < batch.num_rows <= MOST_ROWS
        capture = capture_for(cache.layers[0].k.device) if small and not self._refused else None
        made_here = batch.token_ids.device.type == "cpu" and all(
            len(x) <= batch.num_rows for x in (batch.num_pending, batch.logit_rows)
        )
        if batch.token_ids.device.type == "cpu":
            batch = batch.without_chains()
        # The buffers serve one pass at a time. A concurrent pass runs op by op.
        if capture is None or not made_here or not self._busy.acquire(blocking=False):
            return self._forward(self._ops, batch, cache, captures, *inputs)
        try:
            return self._by_graph(capture, batch, cache, captures, *inputs)
        finally:
            self._busy.release()

    def _by_graph(
        self, capture: Capture, batch: Batch, cache: Any, captures: tuple[int, ...], *inputs: Tensor
    ) -> Results:
        bucket = self._bucket(batch, cache, captures, inputs)
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
        """Record a bucket's graph. If that fails, no graph is recorded again."""

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
        """The choices of the k passes of `steps`, where `batch` is the first pass: int32 [k, 1 or 2, B] (`Ops.choose`).

        The graph of one pass ends by writing the tokens and inputs of the next pass. It is replayed k times, and the
        host reads or writes nothing in between. Returns None if this is not possible; the passes may then run one by
        one.
        """
        small = batch.num_rows <= MOST_ROWS and len(steps.slots) <= MAX_NODES
        able = small and not (self._refused or self._no_chains)
        capture = capture_for(cache.layers[0].k.device) if able else None
        if capture is None or not self._busy.acquire(blocking=False):
            return None
        try:
            return self._by_one_graph(capture, steps, batch.without_chains(), cache, captures, *inputs)
        except RuntimeError as error:
            self._no_chains = True
            log.warning("no graph of a chain could be recorded (%s); its passes come one by one", _reason(error))
            return None
        finally:
            self._busy.release()

    def _by_one_graph(
        self, capture: Capture, steps: Steps, batch: Batch, cache: Any, captures: tuple[int, ...], *inputs: Tensor
    ) -> Tensor:
        bucket = self._bucket(batch, cache, captures, inputs, MAX_NODES)
        buffers = bucket.buffers

        def run() -> Results:
            buffers.take()
            logits, hidden, chosen = self._forward(self._ops, buffers.batch, cache, captures, *buffers.inputs)
            buffers.keep(hidden, chosen)
            return logits, hidden, chosen

        buffers.fill_steps(batch, inputs, steps)
        if bucket.replay is None:
            run()  # compiles the kernels
            buffers.fill_steps(batch, inputs, steps)
            bucket.replay, _ = capture(run)
            buffers.fill_steps(batch, inputs, steps)
        for _ in steps.slots:
            bucket.replay()
        return buffers.choices[: len(steps.slots), :, : batch.num_rows].clone()

    def _bucket(
        self, batch: Batch, cache: Any, captures: tuple[int, ...], inputs: Seq[Tensor], most_steps: int = 0
    ) -> Bucket:
        """The bucket of a batch, or of a chain of at most `most_steps` passes.

        If rows use top-k or top-p, tokens are chosen outside the graph, because the host launches kernels for each row.
        """
        draws = batch.draws if batch.draws is None or not (batch.draws.most or batch.draws.shares) else None
        layer = cache.layers[0].k
        page, device = layer.shape[1], layer.device
        rows, seqs = (1 << (count - 1).bit_length() for count in (batch.num_rows, batch.num_seqs))
        keys = NARROWEST
        while keys < batch.block_tables.shape[1] * page:
            keys *= 4
        drawn = draws and (draws.sure,)
        widths = tuple(x.shape[1] for x in inputs)
        key = captures, rows, seqs, keys, drawn, widths, most_steps
        known = self._buckets.setdefault(cache, OrderedDict())
        if not captures and key not in known:  # recording costs more than unused hidden states
            key = next((k for k, own in known.items() if k[1:] == key[1:] and own.replay is not None), key)
        if key not in known:
            known[key] = Bucket(Buffers(rows, seqs, -(-keys // page), draws, widths, device, most_steps))
            if len(known) > MOST_GRAPHS:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]


def _reason(error: RuntimeError) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


replayer = Graphs  # `forward` through graphs, if the device supports them
