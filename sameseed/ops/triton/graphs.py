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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sameseed import devices
from sameseed.batch import Batch, Draws

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


class Buffers:
    """A batch of `rows` rows of `seqs` sequences, block tables `width` wide, that stays in its place on a device."""

    def __init__(
        self, rows: int, seqs: int, width: int, draws: Draws | None, widths: Seq[int], device: torch.device
    ) -> None:
        """`draws`: how rows of such a pass are drawn; `widths`: of the inputs [T, width] beside the batch."""
        names = ("token_ids", "positions", "slots", "logit_rows", "key_positions")
        long = () if draws is None else ("keys", "divisors", "floors")
        sizes = {"row_offsets": seqs + 1, "num_pending": seqs, "kv_lens": seqs}
        sizes |= {**dict.fromkeys(names, rows), "tree_mask": 2 * rows}
        sizes |= {**dict.fromkeys(long, 2 * rows), **({"greedy": rows} if long else {}), "late_rows": 2 * rows}
        sizes["block_tables"] = seqs * width
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name], end = end, end + size + -size % 4  # each at a multiple of 16 bytes
        self._host, self._there = np.zeros(end, np.int32), torch.zeros(end, dtype=torch.int32, device=device)
        kinds = dict.fromkeys(("tree_mask", "keys", "late_rows"), torch.int64)
        kinds |= dict.fromkeys(("divisors", "floors"), torch.float64)
        self._parts: dict[str, NDArray[Any]] = {}
        there: dict[str, Any] = {}
        for name, start in starts.items():
            part, kind = slice(start, start + sizes[name]), kinds.get(name, torch.int32)
            there[name] = self._there[part].view(kind)
            self._parts[name] = torch.from_numpy(self._host)[part].view(kind).numpy()
        self._late_rows = there.pop("late_rows")
        own = {name: x for name, x in there.items() if name not in (*long, "greedy")}
        own["block_tables"] = own["block_tables"].view(seqs, width)
        self.width, self._tables_at = width, starts["block_tables"]
        nothing = torch.zeros(2, 0, dtype=torch.int64, device=device)
        drawn = None
        if draws is not None:
            keys, divisors, floors, greedy = (there[name] for name in (*long, "greedy"))
            drawn = Draws(keys, divisors, floors, greedy, nothing, 0, (), draws.sure)
        self.batch = Batch(**own, draws=drawn)
        self.inputs = [torch.zeros(rows, w, dtype=torch.float32, device=device) for w in widths]

    def fill(self, batch: Batch, inputs: Seq[Tensor]) -> None:
        """The rows of a batch, which is on the CPU, and behind them rows of nobody; by one copy."""
        rows = batch.num_rows
        given: dict[str, Tensor | None] = {name: x for name, x in vars(batch).items() if name != "draws"}
        given["key_positions"] = batch.positions if batch.key_positions is None else batch.key_positions
        if self.batch.draws is not None and batch.draws is not None:
            given |= {name: getattr(batch.draws, name) for name in ("keys", "divisors", "floors", "greedy")}
        behind = {"slots": -1, "row_offsets": rows, "divisors": 1, "greedy": 1}
        for name, part in self._parts.items():
            x = given[name]
            if name == "block_tables":
                table = batch.block_tables.numpy()
                part.reshape(-1, self.width)[: len(table), : table.shape[1]] = table
                continue
            size = 0 if x is None else len(x)
            if x is not None:
                part[:size] = x.numpy()
            part[size:] = behind.get(name, 0)
        end = self._tables_at + batch.num_seqs * self.width  # what else is in the tables is read by no sequence
        devices.put_into(self._there[:end], torch.from_numpy(self._host[:end].copy()))
        if batch.late is not None:
            self.batch.token_ids.index_copy_(0, self._late_rows[: len(batch.late)], batch.late)
        for buffer, given_input in zip(self.inputs, inputs, strict=True):
            buffer[:rows].copy_(given_input)


@dataclass
class Bucket:
    """Buffers, and once it is recorded, what replays a pass on them, and where its results are."""

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
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning("no graph of a pass could be recorded (%s); passes run op by op, which is slower", reason)

    def _bucket(
        self, device: torch.device, batch: Batch, cache: Any, captures: tuple[int, ...], inputs: Seq[Tensor]
    ) -> Bucket:
        """That of a batch. Rows that are cut to a top-k or top-p are chosen for outside: the host launches for each."""
        draws = batch.draws if batch.draws is None or not (batch.draws.most or batch.draws.shares) else None
        page = cache.layers[0].k.shape[1]
        rows, seqs = (1 << (count - 1).bit_length() for count in (batch.num_rows, batch.num_seqs))
        keys = NARROWEST
        while keys < batch.block_tables.shape[1] * page:
            keys *= 4
        drawn = draws and (draws.sure,)
        key = captures, rows, seqs, keys, drawn, tuple(x.shape[1] for x in inputs)
        known = self._buckets.setdefault(cache, OrderedDict())
        if not captures and key not in known:  # to record costs more than to keep hidden states that nobody asked for
            key = next((k for k, own in known.items() if k[1:] == key[1:] and own.replay is not None), key)
        if key not in known:
            known[key] = Bucket(Buffers(rows, seqs, -(-keys // page), draws, key[-1], device))
            if len(known) > MOST_GRAPHS:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]


def replayer(forward: Forward, ops: Ops) -> Graphs:
    """`forward` by graphs, where the device has them."""
    return Graphs(forward, ops)
