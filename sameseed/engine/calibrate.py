"""How long passes of a loaded model take by their rows: measured in the moment before it serves, for goodput."""

from __future__ import annotations

import time
from statistics import median

from sameseed.lengths._cost import SHORT, Curve
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.draft import Draft

ROWS = (1, 2, 4, 8, 16, 32)
LONG, FEW, MANY = 1024, 1, 8  # tokens of a long context, and the passes measured after it
REPEATS = 5


def measure_curve(runner: ModelRunner, seconds: float = 2.0) -> Curve:
    """Median seconds of passes over 1, 2, 4, ... rows after a short context, and of two after a long one.

    Stops in time, with what it has then. The cache's blocks are free again when this returns; one that is too small
    for all rows, or for a long context, gives fewer points. What the cached rows hold is no matter.
    """
    room = min(runner.blocks.num_free * runner.cache.block_size, runner.model.max_model_len)
    context = min(SHORT, room // 2)
    sizes = [m for m in ROWS if context + m <= room]
    long = min(LONG, room - MANY)
    seq = Sequence(-1, [0] * max(context, long), SamplingParams(), 0)
    runner.blocks.reserve(seq, max(context + sizes[-1], long + MANY))
    end = time.perf_counter() + seconds
    try:
        points: list[tuple[int, float]] = []
        for m in sizes:
            points.append((m, _pass(runner, seq, context, m, end)))
            if time.perf_counter() > end:
                return Curve(points, context)
        if long < 4 * context or FEW not in sizes or MANY not in sizes:
            return Curve(points, context)
        short = dict(points)
        slow = [(_pass(runner, seq, long, m, end) - short[m]) / (long - context) for m in (FEW, MANY)]
        per_row = max(0.0, (slow[1] - slow[0]) / (MANY - FEW))
        return Curve(points, context, max(0.0, slow[0] - FEW * per_row), per_row)
    finally:
        runner.blocks.release(seq)


def _pass(runner: ModelRunner, seq: Sequence, context: int, num_rows: int, end: float) -> float:
    """Median seconds of passes over `num_rows` rows, the first of them after `context` - 1 cached ones."""
    seq.num_cached = context - 1
    del seq.token_ids[context:]
    seq.token_ids += [0] * (context - len(seq))
    draft = Draft.chains([[0] * (num_rows - 1)])
    times: list[float] = []
    while len(times) < REPEATS and (len(times) < 2 or time.perf_counter() < end):
        start = time.perf_counter()
        runner.forward([seq], draft, [1])
        times.append(time.perf_counter() - start)
    return median(times[1:])  # the first pass of a size may have to prepare something
