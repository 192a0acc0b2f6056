"""Simulates rounds of a batch over replayed texts with a cost model: tokens/s and speed-up, with intervals.

Mean acceptance over mean cost does not describe a batch: its sequences end one by one, and a round takes as long as its
longest draft. So the rounds are walked, for all samples of the bootstrap together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sameseed.errors import ConfigError
from sameseed.plan.acceptance import Replay
from sameseed.plan.cost import CostModel, Floats
from sameseed.plan.rounds import Totals, walk

Lengths = int | Seq[int]  # a draft size, or sizes by number of running sequences: [0] for one, [1] for two, ...
LOW, HIGH, Z90 = 0.1, 0.9, 1.2816  # quantiles of an 80 % interval, and its normal z


@dataclass(frozen=True)
class Interval:
    """A figure and its 80 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Simulation:
    """Predicted results of a setting. `mean_rows`: of the target's passes; `tokens_per_round`: of one sequence.

    `draft_share` and `gap_share`: of the time without prefill. `lengths`: draft sizes by running sequences.
    """

    lengths: tuple[int, ...]
    batch_size: int
    tokens_per_s: Interval
    speedup: Interval
    seconds: Interval
    mean_rows: float
    tokens_per_round: float
    num_rounds: int
    draft_share: float
    gap_share: float
    samples: Floats = field(repr=False, compare=False)  # tokens/s, to compare settings sample by sample
    totals: Totals = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the samples."""
        return {name: value for name, value in asdict(self).items() if name not in ("samples", "totals")}


def simulate(
    replay: Replay,
    cost: CostModel,
    lengths: Lengths,
    batch_size: int = 1,
    *,
    refill: bool = False,
    num_samples: int = 100,
    seed: int = 0,
    plain: Simulation | None = None,
    off: float | None = None,
) -> Simulation:
    """Simulate a run over all texts, `batch_size` together, with draft sizes `lengths`; 0 is plain decoding.

    A batch shrinks as its texts end; with `refill` the next prompt takes the place. `plain`: the simulation with
    lengths 0, if known. `seed`: of the bootstrap over prompts and over the costs' spread; with the same seed, settings
    are compared on the same samples. `num_samples` 0: figures without intervals, for a first look at many settings.
    `off`: measured over predicted seconds of real runs like this one (`Residuals`), if there were any.

    Raises ConfigError for sizes that were not replayed, or an interval from fewer than two texts.
    """
    if num_samples and replay.num_texts < 2:
        raise ConfigError("one text tells nothing of how sure a figure is; give two prompts or more")
    if batch_size < 1:
        raise ConfigError(f"a batch size must be at least 1, got {batch_size}")
    table = tuple(_length(lengths, b) for b in range(1, batch_size + 1))
    rng = np.random.default_rng(seed)
    n = replay.num_texts
    orders = np.vstack([np.arange(n), rng.integers(n, size=(num_samples, n))])
    noise = np.vstack([np.zeros(3), rng.standard_normal((num_samples, 3))])
    drafted = np.exp(cost.spread.drafted * np.append(0.0, rng.standard_normal(num_samples)))
    totals = walk(replay, cost, table, orders, batch_size, refill)
    seconds = _seconds(totals, cost, noise)
    if not any(table):
        before = seconds
    elif plain is not None and len(plain.samples) == len(seconds):
        before = plain.totals.tokens / plain.samples
    else:
        before = _seconds(walk(replay, cost, (0,) * batch_size, orders, batch_size, refill), cost, noise)
    if any(table) or off is not None:
        seconds = seconds * drafted * (off or 1.0)
    decoding = totals.target[0] + totals.draft[0] + totals.gap[0]
    return Simulation(
        lengths=table,
        batch_size=batch_size,
        tokens_per_s=interval(totals.tokens / seconds, n),
        speedup=interval(before / seconds, n),
        seconds=interval(seconds, n),
        mean_rows=float(totals.rows[0] / max(1.0, totals.rounds[0])),
        tokens_per_round=float((totals.tokens[0] - n) / max(1.0, totals.decided[0])),
        num_rounds=int(totals.rounds[0]),
        draft_share=float(totals.draft[0] / decoding) if decoding else 0.0,
        gap_share=float(totals.gap[0] / decoding) if decoding else 0.0,
        samples=totals.tokens / seconds,
        totals=totals,
    )


def interval(samples: Floats, num_prompts: int) -> Interval:
    """The first sample, with an 80 % interval from the others: `widened` percentiles of their logarithms."""
    value = float(samples[0])
    if len(samples) < 2 or value <= 0.0:
        return Interval(value, value, value)
    low, high = np.exp(widened(num_prompts) * np.quantile(np.log(samples[1:] / value), (LOW, HIGH)))
    return Interval(value, value * min(1.0, float(low)), value * max(1.0, float(high)))


def widened(num: int) -> float:
    """Factor by which a bootstrap over `num` prompts is too narrow: Student's t over normal, and its own narrowness."""
    free = max(1, num - 1)
    return (1.0 + (Z90**2 + 1.0) / (4.0 * free)) * math.sqrt(num / free)


def best_lengths(
    replay: Replay,
    cost: CostModel,
    batch_size: int,
    margin: float = 0.0,
    off: Callable[[int, int], float] = lambda batch, size: 1.0,
) -> tuple[int, ...]:
    """Draft sizes that goodput would choose: for each number of running sequences the one with most tokens/s.

    Tokens and seconds come from mean acceptance and costs. `off`: measured over predicted seconds, by batch and draft
    size. A draft must promise `margin` more than plain decoding; otherwise its size is 0.
    """
    context = np.array([replay.num_prompts.mean() + replay.num_tokens.mean() / 2])
    sizes = (0, *replay.sizes)
    means = [_Means.of(replay, size) for size in sizes]
    found = []
    for b in range(1, batch_size + 1):
        rates = [
            m.tokens / (float(m.seconds(cost, b, context)[0]) * (off(b, m.size) if m.size else 1.0)) for m in means
        ]
        best = max(range(len(sizes)), key=rates.__getitem__)
        found.append(sizes[best] if rates[best] > rates[0] * (1.0 + margin) else 0)
    return tuple(found)


@dataclass(frozen=True)
class _Means:
    """A mean round of one sequence: `tokens` and `nodes`.

    `within`: for each level, the share of drafts with at most 0, 1, ... steps.
    """

    size: int
    tokens: float
    nodes: float
    within: list[Floats]

    @classmethod
    def of(cls, replay: Replay, size: int) -> _Means:
        if not size:
            return cls(0, 1.0, 0.0, [])
        at, column = replay.rounds(size), replay.column(size)
        steps = replay.steps[at, column]  # [rounds, D]
        within = [np.cumsum(np.bincount(own, minlength=2)) / max(1, len(at)) for own in steps.T]
        accepted, nodes = replay.accepted[at, column], replay.nodes[at, column]
        return cls(size, 1.0 + float(accepted.mean()), float(nodes.mean()), within) if len(at) else cls(size, 1, 0, [])

    def seconds(self, cost: CostModel, batch: int, context: Floats) -> Floats:
        """Seconds of a round of `batch` such sequences, divided by `batch`."""
        b = np.array([float(batch)])
        found = cost.target(b * (1.0 + self.nodes), b, context) + cost.gap(b, np.array([self.size > 0]))
        for level, within in enumerate(self.within):
            used = 1.0 - within[0] ** batch  # probability that at least one sequence uses the level
            if used > 0.0:
                deepest = np.array([float((1.0 - within**batch).sum() / used)])
                own = np.array([batch * (1.0 - float(within[0])) / used])
                found = found + used * cost.draft(level, deepest, own, context)
        return found / batch


def _length(lengths: Lengths, batch: int) -> int:
    if isinstance(lengths, int):
        return lengths
    if not lengths:
        raise ConfigError("draft sizes by batch: give one at least")
    return lengths[min(batch, len(lengths)) - 1]


def _seconds(t: Totals, cost: CostModel, noise: Floats) -> Floats:
    """Seconds of each sample, with costs that vary by their spread."""
    sd = cost.spread
    target, draft, gap = np.exp(noise * (sd.target, sd.draft, sd.gap)).T
    found: Floats = (t.target + t.prefill) * target + t.draft * draft + t.gap * gap
    return found
