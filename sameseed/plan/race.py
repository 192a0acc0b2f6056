"""The race: settings run in turns on the same prompts, the worse half drops out, and more prompts follow.

Successive halving (Jamieson and Talwalkar, 2016) by pairs: of every batch of prompts each setting's time stands beside
plain decoding's, measured within the same seconds, so that a machine that slows down hits all alike. Plain decoding
never drops out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from sameseed.engine.engine import Engine
from sameseed.plan.candidates import Prospect
from sameseed.plan.simulate import Interval
from sameseed.request import SamplingParams
from sameseed.study.measure import Run, run_batch

SAMPLES, LOW, HIGH = 400, 0.1, 0.9  # of the bootstrap; an interval holds 80 %
Job = tuple[tuple[int, ...], SamplingParams]


@dataclass
class Contestant:
    """A setting that runs. By batch size: tokens and seconds of each batch of prompts, and times to first tokens."""

    prospect: Prospect
    engine: Callable[[], Engine]
    jobs: Callable[[int, Seq[int]], list[Job]]  # of these prompts, by number, at a batch size
    tokens: dict[int, list[int]] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    ttft: dict[int, list[float]] = field(default_factory=dict)
    out_at: int | None = None  # prompts after which it dropped out
    texts: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # by batch size and prompt

    @property
    def plain(self) -> bool:
        return self.prospect.candidate.spec.method == "none"

    def run(self, batch: int, members: Seq[int]) -> None:
        """Run these prompts together, and keep what it took."""
        run = Run()
        run_batch(self.engine(), self.jobs(batch, members), run)
        self.tokens.setdefault(batch, []).append(run.num_tokens)
        self.seconds.setdefault(batch, []).append(run.seconds)
        self.ttft.setdefault(batch, []).extend(c.metrics.time_to_first_token or 0.0 for c in run.completions)
        self.texts.update({(batch, i): text for i, text in zip(members, run.texts, strict=True)})

    def tokens_per_s(self, batch: int) -> float:
        """Over all of its prompts at this batch size."""
        return sum(self.tokens[batch]) / sum(self.seconds[batch])


def ratio(one: Contestant, other: Contestant, batches: Seq[int], seed: int = 0) -> Interval:
    """Tokens a second over another's, on the batches of prompts that both ran; the geometric mean over batch sizes.

    The interval (80 %) is a bootstrap over pairs.
    """
    rng = np.random.default_rng(seed)
    whole = np.zeros(SAMPLES + 1)
    for batch in batches:
        count = min(len(one.seconds[batch]), len(other.seconds[batch]))
        picks = np.vstack([np.arange(count), rng.integers(count, size=(SAMPLES, count))])

        def speed(of: Contestant, batch: int = batch, count: int = count, picks: np.ndarray = picks) -> np.ndarray:
            tokens, seconds = np.array(of.tokens[batch][:count]), np.array(of.seconds[batch][:count])
            found: np.ndarray = tokens[picks].sum(1) / seconds[picks].sum(1)
            return found

        whole += np.log(speed(one) / speed(other)) / len(batches)
    low, high = np.exp(np.quantile(whole[1:], (LOW, HIGH)))
    value = math.exp(float(whole[0]))
    return Interval(value, min(value, float(low)), max(value, float(high)))


def race(
    contestants: Seq[Contestant],
    num_prompts: int,
    batches: Seq[int],
    looked_at: Seq[int],
    seconds: float,
    tick: Callable[[str, int, int], None] = lambda stage, done, total: None,
    max_ttft: float | None = None,
    by_ttft: bool = False,
) -> list[Contestant]:
    """All contestants, the best first; those that dropped out early come last.

    Stops when one is better than all others beyond doubt, when all prompts ran, or when the time is over: after the
    first rung at the earliest.
    """
    start, alive, done = time.perf_counter(), list(contestants), 0
    while done < num_prompts:
        upto = min(num_prompts, max(max(batches), 4) if not done else 2 * done)
        for batch in batches:
            groups = [range(i, min(i + batch, upto)) for i in range(done, upto, batch)]
            for g, members in enumerate(groups):
                first = g % len(alive)  # who begins rotates
                for contestant in alive[first:] + alive[:first]:
                    tick(f"race: {len(alive)} settings, batch {batch}", done + g * batch, num_prompts)
                    contestant.run(batch, members)
        done = upto
        order = ranked(alive, looked_at, max_ttft, by_ttft)
        leader, rest = order[0], order[1:]
        kept = [c for c in rest if c.plain or ratio(c, leader, looked_at).high >= 1.0]
        half = max(2, math.ceil(len(order) / 2))
        for i, c in enumerate(order):
            if not c.plain and (i >= half or (c is not leader and c not in kept)):
                c.out_at = done
        alive = [c for c in alive if c.out_at is None]
        if len(alive) == 1 or time.perf_counter() - start > seconds:
            break
    late = ranked([c for c in contestants if c.out_at is None], looked_at, max_ttft, by_ttft)
    return late + sorted((c for c in contestants if c.out_at is not None), key=lambda c: -(c.out_at or 0))


def ranked(
    found: Seq[Contestant], batches: Seq[int], max_ttft: float | None = None, by_ttft: bool = False
) -> list[Contestant]:
    """The best first: by speed against the first one on common prompts, or by time to the first token.

    Those whose median time to the first token is above `max_ttft` seconds come last.
    """

    def late(c: Contestant) -> bool:
        return max_ttft is not None and max(median(c.ttft[b]) for b in batches) > max_ttft

    def value(c: Contestant) -> float:
        if by_ttft:
            return -max(median(c.ttft[b]) for b in batches)
        return ratio(c, found[0], batches).value

    return sorted(found, key=lambda c: (late(c), -value(c)))
