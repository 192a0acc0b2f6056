"""Goodput against fixed lengths and plain decoding in simulated time: machines, drafters and texts of many kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from sameseed.lengths._cost import Curve
from sameseed.lengths.fixed import FixedLength
from sameseed.lengths.goodput import GoodputLength
from sameseed.request import SamplingParams, Sequence, TimeSplit
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import LengthPolicy, Round

LENGTH = 64  # tokens of a text
FIXED = (1, 2, 4, 8)


@dataclass(frozen=True)
class World:
    """`slope`: of a row more, against one row's pass; `step`: of a drafted token, likewise; `rates`: of texts.

    A token is right with a probability near its text's rate; the drafter says what it is, or (`tells` False) nothing.
    """

    slope: float
    step: float
    rates: tuple[float, ...]
    tells: bool = True
    batch: int = 1
    free_rows: int = 1  # rows that cost nothing

    def target(self, rows: float) -> float:
        return 0.01 * (1.0 + self.slope * max(0.0, rows - self.free_rows))


def decode(world: World, policy: LengthPolicy, num_texts: int | None = None) -> float:
    """Seconds for one text's tokens, `batch` at a time; who is done makes room for the next."""
    rng, total, written = random.Random(1), 0.0, 0
    count = num_texts or max(24, 4 * world.batch)
    waiting = [Sequence(i, [1], SamplingParams(max_tokens=LENGTH), 0) for i in range(count)]
    seqs: list[Sequence] = []
    while waiting or seqs:
        while waiting and len(seqs) < world.batch:
            seqs.append(waiting.pop(0))
        if len(seqs) < world.batch:
            break  # the last ones run in smaller passes, which would be another world
        rates = {s.seq_id: world.rates[s.seq_id % len(world.rates)] for s in seqs}
        before = sum(map(len, seqs))
        total += _round(world, policy, seqs, rates, rng)
        written += sum(map(len, seqs)) - before
        for seq in [s for s in seqs if s.num_output >= LENGTH]:
            policy.release(seq)
            seqs.remove(seq)
    for seq in seqs:
        policy.release(seq)
    return total / written * LENGTH


def _round(
    world: World, policy: LengthPolicy, seqs: list[Sequence], rates: dict[int, float], rng: random.Random
) -> float:
    asked = [min(k, s.draft_depth) for k, s in zip(policy.lengths(seqs, len(seqs), 400), seqs)]
    true: list[list[float]] = [[] for _ in seqs]
    paths: list[list[float]] = [[] for _ in seqs]
    steps = 0
    active = [b for b, k in enumerate(asked) if k]
    while active:
        steps += 1
        for b in active:
            rate = rates[seqs[b].seq_id]
            own = min(0.999, max(0.001, rng.betavariate(3 * rate, 3 * (1 - rate))))
            true[b].append(own)
            paths[b].append(own**0.8 * (paths[b][-1] if paths[b] else 1.0))
        active = [b for b in active if len(true[b]) < asked[b]]
        if active and policy.ends([paths[b] for b in active]):
            break
    telling = world.tells and policy.uses_confidence
    draft = Draft.chains([[0] * len(t) for t in true], paths if telling else None)
    draft = policy.trim(draft, seqs, len(seqs))
    counts = [draft.count(b) for b in range(len(seqs))]
    rows = len(seqs) + sum(counts)
    times = TimeSplit(draft=world.step * 0.01 * steps, target=world.target(rows), verify=1e-4)
    accepted = []
    for b in range(len(seqs)):
        right = 0
        while right < counts[b] and rng.random() < true[b][right]:
            right += 1
        accepted.append(right)
    policy.update(Round(seqs, asked, counts, accepted, rows, times, [list(range(a)) for a in accepted]))
    for seq, right in zip(seqs, accepted):
        seq.token_ids += [1] * (right + 1)
    return times.draft + times.target + times.verify


WORLDS = {
    "cheap and good": World(0.02, 0.05, (0.85,)),
    "small pair": World(0.08, 0.3, (0.6, 0.7)),
    "dear and bad": World(0.3, 0.4, (0.4,)),
    "never pays": World(0.8, 0.6, (0.5,)),
    "texts differ": World(0.1, 0.15, (0.9, 0.1)),
    "says nothing": World(0.05, 0.1, (0.8, 0.3), tells=False),
    "batch of 4": World(0.05, 0.2, (0.8, 0.5, 0.7, 0.2), batch=4),
    "batch of 16": World(0.06, 0.3, (0.8, 0.5, 0.7, 0.2), batch=16, free_rows=16),
    "batch of 16, full": World(0.2, 0.5, (0.6, 0.2), batch=16),
}


def make(world: World) -> GoodputLength:
    return GoodputLength(12, Curve([(m, world.target(m)) for m in (1, 2, 4, 8, 16, 32, 64)]))


@pytest.mark.parametrize("name", WORLDS)
def test_never_far_below_the_best(name: str) -> None:
    world = WORLDS[name]
    plain = decode(world, FixedLength(0))
    best = min(decode(world, FixedLength(k)) for k in FIXED)
    policy = make(world)
    decode(world, policy)  # what it learns here it keeps
    found = decode(world, policy)
    print(f"{name:20} plain {plain / found:.3f} best {best / found:.3f}")
    assert plain / found >= 0.98
    assert best / found >= 0.97


def decide(make_one: Callable[[], LengthPolicy], world: World) -> list[int]:
    policy, lengths = make_one(), []
    original = policy.lengths

    def spy(*args: object) -> list[int]:
        found = original(*args)  # type: ignore[arg-type]
        lengths.extend(found)
        return found

    policy.lengths = spy  # type: ignore[method-assign]
    decode(world, policy, 8)
    return lengths


def test_decisions_follow_from_the_rounds_alone() -> None:
    world = WORLDS["batch of 4"]
    assert decide(lambda: make(world), world) == decide(lambda: make(world), world)
