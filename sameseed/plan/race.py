"""The race: settings run interleaved on the same prompts, the worse half drops out, and more prompts follow.

This is successive halving (Jamieson and Talwalkar, 2016) by pairs: a setting's time is compared with plain decoding's
from the same turn, so that a machine that slows down hits all alike. A turn is a few batches long, so that a setting
finds its weights in the caches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

import numpy as np

from sameseed.cost.round import Expected
from sameseed.engine.engine import Engine
from sameseed.measure.bench import Job, Run, run_batch, shortened
from sameseed.plan.grid import Setting, TuneRequest
from sameseed.plan.outlook import Z90
from sameseed.tuned import TunedFigure

OFF = 0.15  # 80 % of the 5,790 predictions in benchmarks/results/tune.jsonl are less far off, as logarithms
SAMPLES, LOW, HIGH = 400, 0.1, 0.9  # bootstrap samples, and the quantiles of an 80 % interval
NOISE = 0.1  # assumed standard deviation of the logarithm of a single pair's ratio
TURN = 4  # batches of prompts that a setting runs in its turn, after WARM_TOKENS unmeasured tokens of a text
WARM_TOKENS = 8
KEEPS = 0.9  # share of requests that must keep a bound
TIMES = {"ttft": "time_to_first_token", "itl": "time_per_output_token"}  # what bounds are of, as fields of Metrics
SETTLED = 1.04  # ratio of the ends of the interval over plain decoding at which the last setting needs no more prompts


@dataclass
class Contestant:
    """A setting, with what is predicted and, once it runs, measured, both by batch size."""

    setting: Setting
    engine: Callable[[], Engine]
    jobs: Seq[Job]  # by prompt number
    promised: dict[int, float] = field(default_factory=dict)  # predicted tokens/s
    rounds: dict[int, Expected] = field(default_factory=dict)  # the predicted mean round
    num_bytes: int = 0  # weights of target and drafts, and the cache of the longest texts at the batch size looked at
    runs: dict[int, list[Run]] = field(default_factory=dict)  # of each batch of prompts, in their order
    out_at: int | None = None  # number of prompts after which it dropped out

    @property
    def plain(self) -> bool:
        return self.setting.plain

    @property
    def label(self) -> str:
        return self.setting.label

    def score(self, batches: Seq[int]) -> float:
        """Geometric mean of predicted tokens/s over these batch sizes."""
        return geometric_mean(self.promised[b] for b in batches)

    def over(self, plain: Contestant, batch: int) -> TunedFigure:
        """Predicted speed-up over the setting `plain` at a batch size."""
        value = self.promised[batch] / plain.promised[batch]
        return TunedFigure(value, value * math.exp(-OFF), value * math.exp(OFF), "profiled")

    def run(self, batch: int, members: Seq[int]) -> None:
        """Run these prompts together."""
        self.runs.setdefault(batch, []).append(run_batch(self.engine(), [self.jobs[i] for i in members]))

    def warm(self, members: Seq[int]) -> None:
        """Generate a few tokens unmeasured: the setting that ran before has filled the caches with its own data."""
        run_batch(self.engine(), shortened([self.jobs[i] for i in members], WARM_TOKENS))

    def tokens_per_s(self, batch: int) -> float:
        """Tokens/s over all prompts that ran at this batch size."""
        return sum(run.num_tokens for run in self.runs[batch]) / sum(run.seconds for run in self.runs[batch])

    def texts(self, batch: int) -> list[tuple[int, ...]]:
        """The tokens of all outputs at this batch size, in the order of the prompts."""
        return [text for run in self.runs.get(batch, ()) for text in run.texts]

    def latency(self, name: str, batches: Seq[int]) -> float:
        """Seconds of "ttft" or "itl" that nine of ten requests stay below, at the worst of these batch sizes."""
        done = ([c.metrics for run in self.runs[b] for c in run.completions] for b in batches)
        return max(float(np.quantile([getattr(m, TIMES[name]) for m in metrics], KEEPS)) for metrics in done)


def anew(c: Contestant, jobs: Seq[Job] | None = None) -> Contestant:
    """The same setting with nothing measured, on these prompts (None: the same ones)."""
    return replace(c, jobs=c.jobs if jobs is None else jobs, out_at=None, runs={})


def missed(c: Contestant, asked: TuneRequest) -> str | None:
    """The bounds that a contestant misses, with what was measured; None where it keeps all."""
    found = [(name, most, c.latency(name, asked.looked_at)) for name, most in asked.slo.items()]
    return "; ".join(f"{name}<{most:g}s missed: {took:.3g} s" for name, most, took in found if took > most) or None


def ranked(found: Seq[Contestant], asked: TuneRequest, careful: bool = False) -> list[Contestant]:
    """Contestants, the best first: bounds are kept, then come the least bytes or time to first token if those are the
    objective, then speed relative to the first of `found`, on prompts that both ran.

    `careful`: by the lower ends of the intervals. The best of many by value alone is often one that scatters most.
    """

    def key(c: Contestant) -> tuple[float, ...]:
        before = c.num_bytes if asked.objective == "memory" else 0
        late = c.latency("ttft", asked.looked_at) if asked.objective == "ttft" else 0.0
        over = ratio(c, found[0], asked.looked_at)
        return missed(c, asked) is not None, before, late, -(over.low if careful else over.value)

    return sorted(found, key=key)


def may_win(c: Contestant, leader: Contestant, asked: TuneRequest) -> bool:
    """May the contestant still be better than the leader, by what was measured?"""
    if asked.objective == "ttft" or missed(leader, asked):
        return True
    if asked.objective == "memory" and c.num_bytes != leader.num_bytes:
        return c.num_bytes < leader.num_bytes
    return ratio(c, leader, asked.looked_at).high >= 1.0


def ratio(one: Contestant, other: Contestant, batches: Seq[int]) -> TunedFigure:
    """Tokens/s over another's, on the batches of prompts that both ran; the geometric mean over batch sizes.

    The interval (80 %) is a bootstrap over pairs, widened for few; a single pair is taken to scatter by `NOISE`.
    """
    if one is other:
        return TunedFigure(1.0, 1.0, 1.0)
    rng = np.random.default_rng(0)
    value, spread = 0.0, np.zeros(SAMPLES)
    for batch in batches:
        count = min(len(one.runs[batch]), len(other.runs[batch]))
        picks = np.vstack([np.arange(count), rng.integers(count, size=(SAMPLES, count))])
        logs = np.zeros(SAMPLES + 1)
        for of, sign in ((one, 1.0), (other, -1.0)):
            tokens, seconds = np.array([(run.num_tokens, run.seconds) for run in of.runs[batch][:count]]).T
            logs += sign * np.log(tokens[picks].sum(1) / seconds[picks].sum(1))
        value += float(logs[0]) / len(batches)
        off = NOISE * rng.standard_normal(SAMPLES) if count == 1 else widened(count) * (logs[1:] - logs[0])
        spread += off / len(batches)
    low, high = np.exp(value + np.quantile(spread, (LOW, HIGH)))
    return TunedFigure(math.exp(value), min(math.exp(value), float(low)), max(math.exp(value), float(high)))


def widened(num: int) -> float:
    """Factor by which a bootstrap over `num` prompts is too narrow: Student's t over normal, and its own narrowness."""
    free = max(1, num - 1)
    return (1.0 + (Z90**2 + 1.0) / (4.0 * free)) * math.sqrt(num / free)


def first_rung(num_prompts: int, batches: Seq[int]) -> int:
    """Number of prompts in the first rung of the race."""
    return min(num_prompts, max(*batches, 4))


def race(
    contestants: Seq[Contestant],
    asked: TuneRequest,
    num_prompts: int,
    seconds: float,
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
        upto = min(num_prompts, 2 * done or first_rung(num_prompts, asked.batches))
        for batch in asked.batches:
            groups = [range(i, min(i + batch, upto)) for i in range(done, upto, batch)]
            for g in range(0, len(groups), TURN):
                if done and not all_run and time.perf_counter() - start > seconds:
                    break  # not before the end of the first rung: all have run on the same prompts until now
                first = g // TURN % len(alive)  # rotates which contestant begins
                for c in alive[first:] + alive[:first]:
                    tick(f"race: {len(alive)} settings, batch {batch}", done + g * batch, num_prompts)
                    c.warm(groups[g])
                    for members in groups[g : g + TURN]:
                        c.run(batch, members)
        done = upto
        if all_run or done == num_prompts:
            continue
        order = ranked(alive, asked)
        half = max(2, math.ceil(len(order) / 2))
        for i, c in enumerate(order):
            if c is not reference and (i >= half or not (c is order[0] or may_win(c, order[0], asked))):
                c.out_at = done
        alive = [c for c in alive if c.out_at is None]
        lead = ratio(next((c for c in alive if c is not reference), reference), reference, asked.batches)
        # High quantiles of latencies need more prompts than a ratio of speeds.
        settled = lead.high <= SETTLED * lead.low and asked.objective != "ttft" and not asked.slo
        if (len(alive) <= 2 and settled) or time.perf_counter() - start > seconds:
            break
    late = ranked([reference, *(c for c in alive if c is not reference)], asked, careful=True)
    out = ranked([reference, *(c for c in contestants if c.out_at is not None)], asked)
    return late + sorted((c for c in out if c is not reference), key=lambda c: -(c.out_at or 0))
