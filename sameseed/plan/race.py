"""The race: settings run interleaved on the same prompts, the worse half drops out, and more prompts follow.

This is successive halving (Jamieson and Talwalkar, 2016) by pairs: for every batch of prompts, a setting's time is
compared with plain decoding's from the same turn, so that a machine that slows down hits all alike. A turn is a few
batches long, so that a setting finds its weights in the caches, as it would when running alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from sameseed.engine.engine import Engine
from sameseed.measure.bench import Run, run_batch
from sameseed.plan.candidates import Prospect
from sameseed.plan.grid import Bound, Interval, TuneRequest
from sameseed.plan.outlook import Z90
from sameseed.request import SamplingParams

SAMPLES, LOW, HIGH = 400, 0.1, 0.9  # bootstrap samples, and the quantiles of an 80 % interval
NOISE = 0.1  # assumed standard deviation of the logarithm of a single pair's ratio
TURN = 4  # batches of prompts that a setting runs in its turn, after WARM_TOKENS unmeasured tokens of a text
WARM_TOKENS = 8
KEEPS = 0.9  # share of requests that must keep a bound
SETTLED = 1.04  # ratio of the ends of the interval over plain decoding at which the last setting needs no more prompts
Job = tuple[tuple[int, ...], SamplingParams]


@dataclass
class Contestant:
    """A setting that runs, with what was measured by batch size.

    `tokens` and `seconds` are those of each batch of prompts. Of each request, `ttft` is the seconds to the first
    token, and `itl` those of a token after it.
    """

    prospect: Prospect
    engine: Callable[[], Engine]
    jobs: Callable[[int, Seq[int]], list[Job]]  # the jobs of these prompt numbers, at a batch size
    tokens: dict[int, list[int]] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    ttft: dict[int, list[float]] = field(default_factory=dict)
    itl: dict[int, list[float]] = field(default_factory=dict)
    out_at: int | None = None  # number of prompts after which it dropped out
    texts: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # by batch size and prompt number

    @property
    def plain(self) -> bool:
        return self.prospect.candidate.plain

    @property
    def label(self) -> str:
        return self.prospect.candidate.label

    def run(self, batch: int, members: Seq[int]) -> None:
        """Run these prompts together, and record tokens, times and texts."""
        run = Run()
        run_batch(self.engine(), self.jobs(batch, members), run)
        self.tokens.setdefault(batch, []).append(run.num_tokens)
        self.seconds.setdefault(batch, []).append(run.seconds)
        self.ttft.setdefault(batch, []).extend(c.metrics.time_to_first_token for c in run.completions)
        self.itl.setdefault(batch, []).extend(c.metrics.time_per_output_token for c in run.completions)
        self.texts.update({(batch, i): text for i, text in zip(members, run.texts, strict=True)})

    def warm(self, batch: int, members: Seq[int]) -> None:
        """Generate a few tokens unmeasured: the setting that ran before has filled the caches with its own data."""
        few = [
            (tokens, replace(params, max_tokens=min(WARM_TOKENS, params.max_tokens), min_tokens=0))
            for tokens, params in self.jobs(batch, members)
        ]
        run_batch(self.engine(), few, Run())

    def tokens_per_s(self, batch: int) -> float:
        """Tokens/s over all prompts that ran at this batch size."""
        return sum(self.tokens[batch]) / sum(self.seconds[batch])

    def latency(self, name: str, batches: Seq[int]) -> float:
        """Seconds of "ttft" or "itl" that nine of ten requests stay below, at the worst of these batch sizes."""
        return max(float(np.quantile(getattr(self, name)[b], KEEPS)) for b in batches)


def anew(c: Contestant) -> Contestant:
    """The same setting with nothing measured."""
    return replace(c, tokens={}, seconds={}, ttft={}, itl={}, texts={})


@dataclass(frozen=True)
class Aim:
    """The objective: bounds are kept, then the least bytes or time to first token if `by` says so, then speed."""

    batches: tuple[int, ...]
    by: str = "speed"  # or "ttft", "memory"
    slo: tuple[Bound, ...] = ()

    @classmethod
    def of(cls, asked: TuneRequest) -> Aim:
        return cls(asked.looked_at, asked.objective if asked.objective in ("ttft", "memory") else "speed", asked.slo)

    @property
    def needs_latency(self) -> bool:
        """Are latencies compared? Their high quantiles need more prompts than a ratio of speeds."""
        return self.by == "ttft" or bool(self.slo)

    def missed(self, c: Contestant) -> str | None:
        """The bounds that a contestant misses, with what was measured; None where it keeps all."""
        found = [(b, c.latency(b.name, self.batches)) for b in self.slo]
        return "; ".join(f"{b} missed: {took:.3g} s" for b, took in found if took > b.seconds) or None

    def ranked(self, found: Seq[Contestant], careful: bool = False) -> list[Contestant]:
        """Contestants, the best first; speed is relative to the first of `found`, on prompts that both ran.

        `careful`: by the lower ends of the intervals. The best of many by value alone is often one that scatters most.
        """

        def key(c: Contestant) -> tuple[float, ...]:
            before = c.prospect.num_bytes if self.by == "memory" else 0
            late = c.latency("ttft", self.batches) if self.by == "ttft" else 0.0
            over = ratio(c, found[0], self.batches)
            return self.missed(c) is not None, before, late, -(over.low if careful else over.value)

        return sorted(found, key=key)

    def may_win(self, c: Contestant, leader: Contestant) -> bool:
        """May the contestant still be better than the leader, by what was measured?"""
        if self.by == "ttft" or self.missed(leader):
            return True
        if self.by == "memory" and c.prospect.num_bytes != leader.prospect.num_bytes:
            return c.prospect.num_bytes < leader.prospect.num_bytes
        return ratio(c, leader, self.batches).high >= 1.0


def ratio(one: Contestant, other: Contestant, batches: Seq[int], seed: int = 0) -> Interval:
    """Tokens/s over another's, on the batches of prompts that both ran; the geometric mean over batch sizes.

    The interval (80 %) is a bootstrap over pairs, widened for few; a single pair is taken to scatter by `NOISE`.
    """
    if one is other:
        return Interval(1.0, 1.0, 1.0)
    rng = np.random.default_rng(seed)
    value, spread = 0.0, np.zeros(SAMPLES)
    for batch in batches:
        count = min(len(one.seconds[batch]), len(other.seconds[batch]))
        picks = np.vstack([np.arange(count), rng.integers(count, size=(SAMPLES, count))])
        logs = np.zeros(SAMPLES + 1)
        for of, sign in ((one, 1.0), (other, -1.0)):
            tokens, seconds = np.array(of.tokens[batch][:count]), np.array(of.seconds[batch][:count])
            logs += sign * np.log(tokens[picks].sum(1) / seconds[picks].sum(1))
        value += float(logs[0]) / len(batches)
        off = NOISE * rng.standard_normal(SAMPLES) if count == 1 else widened(count) * (logs[1:] - logs[0])
        spread += off / len(batches)
    low, high = np.exp(value + np.quantile(spread, (LOW, HIGH)))
    return Interval(math.exp(value), min(math.exp(value), float(low)), max(math.exp(value), float(high)))


def widened(num: int) -> float:
    """Factor by which a bootstrap over `num` prompts is too narrow: Student's t over normal, and its own narrowness."""
    free = max(1, num - 1)
    return (1.0 + (Z90**2 + 1.0) / (4.0 * free)) * math.sqrt(num / free)


def first_rung(num_prompts: int, batches: Seq[int]) -> int:
    """Number of prompts in the first rung of the race."""
    return min(num_prompts, max(*batches, 4))


def race(
    contestants: Seq[Contestant],
    num_prompts: int,
    batches: Seq[int],
    seconds: float,
    aim: Aim,
    tick: Callable[[str, int, int], None] = lambda stage, done, total: None,
    all_run: bool = False,
) -> list[Contestant]:
    """All contestants, the best first; those that dropped out early come last. `all_run`: none drops out.

    The first one that decodes plainly never drops out, because all are compared with it. The race stops when plain
    decoding alone is left, or one setting whose lead over it is known well (`SETTLED`); when all prompts ran; or when
    `seconds` are over, but not before the end of the first rung. Those that did not drop out are ranked carefully.
    """
    start, alive, done = time.perf_counter(), list(contestants), 0
    reference = next(c for c in alive if c.plain)
    while done < num_prompts:
        upto = min(num_prompts, 2 * done or first_rung(num_prompts, batches))
        for batch in batches:
            groups = [range(i, min(i + batch, upto)) for i in range(done, upto, batch)]
            for g in range(0, len(groups), TURN):
                if done and not all_run and time.perf_counter() - start > seconds:
                    break  # not before the end of the first rung: all have run on the same prompts until now
                first = g // TURN % len(alive)  # rotates which contestant begins
                for c in alive[first:] + alive[:first]:
                    tick(f"race: {len(alive)} settings, batch {batch}", done + g * batch, num_prompts)
                    c.warm(batch, groups[g])
                    for members in groups[g : g + TURN]:
                        c.run(batch, members)
        done = upto
        if all_run or done == num_prompts:
            continue
        order = aim.ranked(alive)
        half = max(2, math.ceil(len(order) / 2))
        for i, c in enumerate(order):
            if c is not reference and (i >= half or not (c is order[0] or aim.may_win(c, order[0]))):
                c.out_at = done
        alive = [c for c in alive if c.out_at is None]
        lead = ratio(next((c for c in alive if c is not reference), reference), reference, batches)
        settled = lead.high <= SETTLED * lead.low and not aim.needs_latency
        if (len(alive) <= 2 and settled) or time.perf_counter() - start > seconds:
            break
    late = aim.ranked([reference, *(c for c in alive if c is not reference)], careful=True)
    out = [c for c in aim.ranked([reference, *(c for c in contestants if c.out_at is not None)]) if c is not reference]
    return late + sorted(out, key=lambda c: -(c.out_at or 0))
