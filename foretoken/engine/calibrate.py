"""How long passes of a loaded model take by their rows: measured in the moment before it serves, for goodput."""

from __future__ import annotations

import time
from statistics import median

from foretoken.models.runner import ModelRunner
from foretoken.request import SamplingParams, Sequence
from foretoken.spec.draft import Draft
from foretoken.spec.goodput import Curve

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 64  # tokens that the measured rows attend to
REPEATS = 5


def measure_curve(runner: ModelRunner, seconds: float = 2.0) -> Curve:
    """Median seconds of passes over 1, 2, 4, ... rows after a short context; stops in time, with what it has then.

    The cache's blocks are free again when this returns; a cache that is too small for all rows gives fewer points.
    """
    room = runner.blocks.num_free * runner.cache.block_size
    context = min(CONTEXT, room // 2, runner.model.max_model_len // 2)
    sizes = [m for m in ROWS if context + m <= min(room, runner.model.max_model_len)]
    seq = Sequence(-1, [0] * context, SamplingParams(), 0)
    runner.blocks.reserve(seq, context + sizes[-1])
    try:
        out = runner.forward([seq], Draft.empty(1), [context - 1])
        runner.commit([seq], [context - 1], [[]], out)
        points: list[tuple[int, float]] = []
        end = time.perf_counter() + seconds
        for m in sizes:
            draft = Draft.chains([[0] * (m - 1)])
            times: list[float] = []
            while len(times) < REPEATS and (len(times) < 2 or time.perf_counter() < end):
                start = time.perf_counter()
                runner.forward([seq], draft, [1])
                times.append(time.perf_counter() - start)
            points.append((m, median(times[1:])))  # the first pass of a size may have to prepare something
            if time.perf_counter() > end:
                break
        return Curve(points)
    finally:
        runner.blocks.release(seq)
