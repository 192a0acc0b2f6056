"""Measures what rounds of a loaded engine cost, before it serves requests, for length policies that use costs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

from sameseed.cost.curve import SHORT, Curve
from sameseed.cost.running import DraftCost, EngineCost, GapCost
from sameseed.engine.alarm import Alarm
from sameseed.engine.policies import CALIBRATING
from sameseed.lengths.fixed import FixedLength
from sameseed.models.runner import ModelRunner, Output
from sameseed.ops.reference import one_thread
from sameseed.request import Request, SamplingParams, Sequence, SpecMetrics, TimeSplit
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, Round
from sameseed.spec.step import decode_step

if TYPE_CHECKING:
    from sameseed.engine.engine import Engine

ROWS = (1, 2, 4, 6, 8, 12, 16, 32)
LONG, FEW, MANY = 1024, 1, 8  # tokens of a long context, and rows of the two passes that are measured after it
REPEATS, QUICK = 5, 0.005  # of a pass; seconds of a one-row pass below which warm-up rounds are run first
PASSES, MOST = 24, 8.0  # passes that measuring may always take, and seconds to which that is limited
BATCHES, LENGTHS = (1, 4), (4, 2, 0)  # batch sizes and draft lengths of the measured rounds
PROMPT, TOKENS = 8, 16  # prompt and output tokens of the texts that `measure_engine` lets the engine write


@one_thread()  # as in the engine's steps
def measure_curve(runner: ModelRunner, seconds: float = 2.0, rows: Seq[int] = ROWS, longest: int = LONG) -> Curve:
    """Median seconds of passes over `rows` rows after a short context, and of two passes after `longest` tokens.

    Sizes run interleaved, so that a slow moment meets each alike. Ends after about `seconds`, but `PASSES` passes have
    `MOST` seconds. A small cache, or too little time, gives fewer points.
    """
    room = min(runner.blocks.num_free * runner.cache.block_size, runner.model.max_model_len)
    context, long = min(SHORT, room // 2), min(longest, room - MANY)
    sizes = [m for m in rows if context + m <= room]
    after_long = [(long, m) for m in (FEW, MANY) if long >= 4 * context and {FEW, MANY} <= {*sizes}]
    kinds = [*((context, m) for m in sizes), *after_long]
    seq = Sequence(-1, [0] * max(context, long), SamplingParams(), 0)
    runner.blocks.reserve(seq, max(context + sizes[-1], long + MANY))
    drafts = {kind: [0] * (kind[1] - 1) for kind in kinds}
    times: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    end = (start := time.perf_counter()) + seconds
    try:
        # The first pass of a size may include one-time preparation: the second one follows at once.
        for kind in [kind for kind in kinds for _ in range(2)] + (REPEATS - 2) * kinds:
            if len(times[kinds[0]]) > 1 and len(times[kind]) != 1 and time.perf_counter() > end:
                break
            seq.num_cached = seq.num_settled = kind[0] - 1
            seq.token_ids[:] = [0] * kind[0]
            took, out = timed_pass(runner, [seq], Draft.chains([drafts[kind]]))
            times[kind].append(took)
            # Likely tokens after each row: equal rows would all choose the same experts.
            drafts[kind] = [int(row.topk(4).indices[i % 4]) for i, row in enumerate(out.logits[:-1])]
            if len(times[kinds[0]]) == 2:
                end = max(end, start + min(PASSES * times[kinds[0]][1], MOST))
    finally:
        runner.blocks.release(seq)
    medians = {kind: median(each[1:]) for kind, each in times.items() if each}
    curve = Curve([(m, medians[context, m]) for m in sizes if (context, m) in medians], context)
    if after_long and after_long[-1] in medians:
        few, many = ((medians[long, m] - medians[context, m]) / (long - context) for m in (FEW, MANY))
        curve.per_row = max(0.0, (many - few) / (MANY - FEW))
        curve.per_token = max(0.0, few - FEW * curve.per_row)
    return curve


@one_thread()
def measure_rounds(runner: ModelRunner, drafter: Drafter, seconds: float = 2.0) -> EngineCost:
    """The target's passes, then rounds of random texts, with and without drafts; no gap between passes.

    Blocks and the drafter's counters are as before when this returns.
    """
    cost = EngineCost(measure_curve(runner, seconds), DraftCost(type(drafter).at_once))
    counted = [(metrics, vars(metrics.copy())) for _, metrics in drafter.counted()]
    rng = random.Random(0)
    end = time.perf_counter() + max(seconds, min(PASSES * cost.target.at(MANY), MOST))
    for size in BATCHES:
        if size == BATCHES[0] or cost.target.at(FEW) < QUICK:  # a size's first rounds include one-time preparation
            _rounds(runner, drafter, EngineCost(cost.target), size, (LENGTHS[0],) * 2, rng, end)
        lengths = [k for k in LENGTHS for _ in range(REPEATS)]
        unseen, late, measured = _rounds(runner, drafter, cost, size, lengths, rng, end)
        if measured > 2:  # both catch-up rounds were measured, and others after them
            start, step = cost.draft.terms(size, unseen / size)
            cost.catch_up = max(0.0, late - 2 * (start + LENGTHS[0] * step)) / unseen
    for metrics, before in counted:
        vars(metrics).update(before)
    cost.gap = GapCost()  # an engine does more between its passes than this loop
    return cost


def measure_engine(engine: Engine, seconds: float) -> EngineCost:
    """`measure_rounds`, corrected by rounds of the engine itself, gaps included; its counters leave them out."""
    cost = measure_rounds(engine.runner, engine.drafter, seconds)
    counted = [(metrics, vars(metrics.copy())) for _, metrics in engine.drafter.counted()]
    kept = {name: vars(engine)[name] for name in ("alarm", "times", "metrics")}
    policy, rng, vocab_size = engine.policy, random.Random(1), engine.runner.model.config.vocab_size
    engine.alarm, engine.times, engine.metrics = Alarm(), TimeSplit(), SpecMetrics()
    length = min(PROMPT, engine.max_model_len // 2)
    params = SamplingParams(max_tokens=min(TOKENS, engine.max_model_len - length), ignore_eos=True)
    try:
        for size, k in ((size, k) for size in BATCHES for k in LENGTHS):
            engine.policy = _Learner(k, cost=cost)
            for i in range(size):
                prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
                engine.add(Request(f"{__name__}-{size}-{k}-{i}", prompt, params, 0, tenant=CALIBRATING))
            while engine.has_work:
                engine.step()
    finally:
        engine.policy = policy
        vars(engine).update(kept)
        for metrics, before in counted:
            vars(metrics).update(before)
    return cost


@dataclass(frozen=True, kw_only=True)
class _Learner(FixedLength):
    """A fixed length; `cost` learns from rounds without prompt rows, but not from two in which a drafter catches up."""

    cost: EngineCost
    rounds: Iterator[int] = field(default_factory=count)

    def update(self, round_: Round) -> None:
        if next(self.rounds) > 1 and round_.num_rows == len(round_.seqs) + sum(round_.num_draft):
            self.cost.learn(round_, max(round_.num_asked), False)


def _rounds(
    runner: ModelRunner,
    drafter: Drafter,
    cost: EngineCost,
    size: int,
    lengths: Seq[int],
    rng: random.Random,
    end: float,
) -> tuple[int, float, int]:
    """Run rounds of `size` new texts with these draft lengths, learned by `cost`. Stops at time `end`, or without room.

    Returns the tokens that the drafter had to catch up with, the seconds of its first two proposals, and the rounds.
    """
    vocab_size, longest = runner.model.config.vocab_size, runner.model.max_model_len
    texts = [[rng.randrange(vocab_size) for _ in range(min(SHORT, longest // 2))] for _ in range(size)]
    seqs = [Sequence(-1 - b, text, SamplingParams(max_tokens=longest), 0) for b, text in enumerate(texts)]
    unseen, late, measured = sum(map(len, seqs)), 0.0, 0
    try:
        for k in lengths:
            pending = [seq.num_pending for seq in seqs]
            fits = all(len(s) + k < longest and runner.blocks.reserve(s, len(s) + k) for s in seqs)
            if time.perf_counter() > end or not fits:
                break
            times = TimeSplit()
            draft, found = decode_step(runner, drafter, seqs, pending, [k] * size, times)
            for seq in seqs:  # random tokens, since a looping text would be drafted at another cost
                seq.token_ids[-1] = rng.randrange(vocab_size)
            counts = [draft.count(b) for b in range(size)]
            accepted = [len(nodes) for nodes in found.nodes]
            catching_up = measured < 2  # a head reads the text's hidden states after the first pass
            late += times.draft * catching_up
            cost.learn(Round(seqs, [k] * size, counts, accepted, sum(pending + counts), times), k, catching_up)
            measured += 1
    finally:
        for seq in seqs:
            seq.token_ids.clear()  # drafters must not learn from such a text
            drafter.release(seq)
            runner.blocks.release(seq)
    return unseen, late, measured


def timed_pass(runner: ModelRunner, seqs: Seq[Sequence], draft: Draft) -> tuple[float, Output]:
    """Seconds of a forward pass whose rows are taken back, and its result."""
    before, pending, start = [seq.num_settled for seq in seqs], [seq.num_pending for seq in seqs], time.perf_counter()
    out = runner.forward(seqs, draft, pending)
    seconds = time.perf_counter() - start
    for seq, settled in zip(seqs, before):
        seq.num_settled = settled
    return seconds, out
