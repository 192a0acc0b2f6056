"""Goodput against fixed lengths and plain decoding in simulated time, for many machines, drafters and texts."""

import itertools
import math
import random
from dataclasses import dataclass, replace
from statistics import mean
from types import SimpleNamespace

import pytest

from sameseed.cost.curve import Curve
from sameseed.cost.running import EngineCost
from sameseed.lengths import goodput
from sameseed.lengths.fixed import FixedLength
from sameseed.lengths.goodput import GoodputLength
from sameseed.request import SamplingParams, Sequence, TimeSplit
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, Round

LENGTH = 96  # mean number of tokens per text
FIXED = (1, 2, 4, 8)
COLDER = -1  # in what a drafter has seen of each sequence: per mille of `World.cold` in the last round


@pytest.fixture(autouse=True, scope="module")
def _clock():
    """Decisions take 61 us each, exactly: real times, and so the lengths of rests, depend on the machine."""
    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(goodput, "time", SimpleNamespace(perf_counter=lambda: 2.0**-14 * next(ticks)))
        yield


@dataclass(frozen=True)
class World:
    """Costs in milliseconds and acceptance of a simulated engine.

    A target pass takes about the larger of `memory` (to read weights) and `row` per row (arithmetic). A draft takes
    `start`, and `step` per step; `gap` is spent outside both. A token is right with a probability near its text's rate;
    the drafter estimates that probability, or (`tells` False) does not. `looks_up`: the share of rounds in which a
    lookup gives the draft at no cost. `drift`: the time to read slowly grows by this share and shrinks again, with a
    period of 2 pi * 150 passes.
    """

    memory: float
    row: float
    start: float
    step: float
    rates: tuple[float, ...]
    batch: int = 1
    tells: bool = True
    looks_up: float = 0.0
    gap: float = 0.3
    drift: float = 0.0
    noise: float = 0.04
    prompt: int = 1  # tokens of a text that exist at the start
    catch_up: float = 0.0  # milliseconds of the drafter per token that it has yet to read
    ends: bool = True  # whether the drafter asks if a chain should end; one that drafts trees does not
    slow_start: float = 1.0  # factor on passes during calibration
    more: float = 0.0  # extra milliseconds outside both, in a round with a draft
    cold: float = 1.0  # factor on the target's pass after a draft, since its weights have left the CPU's cache
    warming: float = 0.0  # share of that which a plain round's pass keeps of the pass before it
    prefills: bool = False  # whether prompts have a pass of their own

    def read(self, now):
        return self.memory * (1.0 + self.drift * (0.5 - 0.5 * math.cos(now / (150 * self.memory))))

    def target(self, rows, now=0.0):
        return (self.read(now) ** 3 + (self.row * rows) ** 3) ** (1 / 3)

    def measured(self):
        """The result of calibration: the costs of passes, then of rounds with drafts."""
        slow = 1e-3 * self.slow_start
        cost = EngineCost(Curve([(m, slow * self.target(m)) for m in (1, 2, 4, 8, 16, 32)]))
        for size in (1, 4):
            seqs = [Sequence(-1 - b, [1], SamplingParams(), 0) for b in range(size)]
            for k in [4, 2, 0] * 4:
                rows = size * (1 + k)
                draft = slow * (self.start + self.step * k) if k else 0.0
                times = TimeSplit(draft=draft, target=slow * self.target(rows), verify=1e-3 * self.gap)
                cost.learn(Round(seqs, [k] * size, [k] * size, [0] * size, rows, times), k, False)
        cost.catch_up = 1e-3 * self.catch_up
        return cost


class Reader(Drafter):
    """Has read of each text what `seen` says."""

    must_read = True

    def __init__(self, seen):
        self.seen = seen

    def num_read(self, seq):
        return self.seen.get(seq.seq_id, 0)


def decode(world, policy, num_texts):
    """Milliseconds per token, with `batch` texts at a time; a text that is done makes room for the next."""
    rng, now, written = random.Random(1), 0.0, 0
    lengths = [max(8, min(4 * LENGTH, int(rng.expovariate(1 / LENGTH)))) for _ in range(num_texts)]
    waiting = [Sequence(i, [1] * world.prompt, SamplingParams(max_tokens=n), 0) for i, n in enumerate(lengths)]
    seqs = []
    seen = {}
    if isinstance(policy, GoodputLength):
        policy.drafter = Reader(seen)
    while waiting or seqs:
        while waiting and len(seqs) < world.batch:
            seqs.append(waiting.pop(0))
        before = sum(map(len, seqs))
        now += _round(world, policy, seqs, rng, now, seen)
        written += sum(map(len, seqs)) - before
        for seq in [s for s in seqs if s.num_output >= s.params.max_tokens]:
            policy.release(seq)
            seqs.remove(seq)
    return now / written


def _propose(world, policy, seqs, asked, rng):
    """The true probability of each token, the drafter's estimate for each path, and the milliseconds spent."""
    true = [[] for _ in seqs]
    paths = [[] for _ in seqs]
    active = [b for b, k in enumerate(asked) if k]
    for b in list(active):
        if rng.random() < world.looks_up:
            own = 0.5 + 0.45 * world.rates[seqs[b].seq_id % len(world.rates)]
            true[b] = [own] * asked[b]
            paths[b] = [own ** (j + 1) for j in range(asked[b])]
            active.remove(b)
    spent = world.start if active else 0.02
    while active:
        spent += world.step
        for b in active:
            rate = world.rates[seqs[b].seq_id % len(world.rates)]
            own = min(0.999, max(0.001, rng.betavariate(3 * rate, 3 * (1 - rate))))
            true[b].append(own)
            paths[b].append(own**0.8 * (paths[b][-1] if paths[b] else 1.0))
        active = [b for b in active if len(true[b]) < asked[b]]
        if active and world.ends and policy.ends([paths[b] for b in active]):
            break
    return true, paths, spent


def _round(world, policy, seqs, rng, now, seen):
    new = sum(world.prefills and s.num_output == 0 for s in seqs)
    if new:
        rows = len(seqs) + new * (world.prompt - 1)
        times = TimeSplit(target=1e-3 * world.target(rows, now), verify=1e-3 * world.gap)
        policy.update(Round(seqs, [0] * len(seqs), [0] * len(seqs), [0] * len(seqs), rows, times))
        for seq in seqs:
            seq.token_ids.append(1)
        return 1e3 * (times.target + times.verify)
    asked = [min(k, s.draft_depth) for k, s in zip(policy.lengths(seqs, len(seqs), 400), seqs)]
    true, paths, spent = _propose(world, policy, seqs, asked, rng)
    for seq in (s for s, k in zip(seqs, asked) if k):
        spent += world.catch_up * (len(seq) - seen.get(seq.seq_id, 0))
        seen[seq.seq_id] = len(seq)
    telling = world.tells and policy.uses_confidence
    draft = policy.trim(Draft.chains([[0] * len(t) for t in true], paths if telling else None), seqs, len(seqs))
    counts = [draft.count(b) for b in range(len(seqs))]
    rows = len(seqs) + sum(counts)
    noise = [math.exp(rng.gauss(0.0, world.noise)) for _ in range(2)]
    drafted = any(counts)
    colder = seen[COLDER] = 1000 if drafted else round(seen.get(COLDER, 0) * world.warming)
    cold, more = 1.0 + (world.cold - 1.0) * colder / 1000, world.more if drafted else 0.0
    times = TimeSplit(
        draft=1e-3 * spent * noise[0] if any(asked) else 0.0,
        target=1e-3 * world.target(rows, now) * noise[1] * cold,
        verify=1e-3 * (world.gap + more),
    )
    accepted = [next((i for i in range(n) if rng.random() >= chance[i]), n) for n, chance in zip(counts, true)]
    policy.update(Round(seqs, asked, counts, accepted, rows, times, [list(range(a)) for a in accepted]))
    for seq, right in zip(seqs, accepted):
        seq.token_ids += [1] * (right + 1)
    return 1e3 * (times.draft + times.target + times.verify)


MIXED = (0.9, 0.2, 0.6, 0.4)
WORLDS = {
    "small pair, chat": World(0.18, 0.042, 0.02, 0.1, (0.6,), gap=0.12),
    "small pair, code, batch of 4": World(0.18, 0.042, 0.03, 0.14, (0.8,), 4, gap=0.2),
    "small pair, orders, dear starts": World(0.22, 0.042, 0.25, 0.1, (0.75,), gap=0.4),
    "small pair, breaks even at 0.6": World(0.65, 0.15, 0.02, 0.24, (0.75,), gap=0.5, prompt=80, catch_up=0.013),
    "small head, mixed, batch of 16": World(1.6, 0.65, 3.0, 4.0, MIXED, 16),
    "1B head, random": World(28, 6.0, 1.3, 5.0, (0.2,)),
    "1B head, code, drifts": World(13.3, 1.86, 0.7, 2.1, (0.8,), drift=1.0),
    "1B suffix + head, mixed, batch of 4": World(13.3, 1.86, 1.3, 3.0, MIXED, 4, looks_up=0.4),
    "1B suffix + head, mixed, batch of 8, drifts": World(13.3, 1.86, 2.0, 4.0, MIXED, 8, looks_up=0.4, drift=1.0),
    "1B ngram, repetitive, batch of 4": World(13.3, 1.86, 0.0, 0.01, (0.9,), 4, tells=False),
    "8B head, chat, batch of 4": World(52, 9.2, 4.0, 8.0, (0.6,), 4),
    "8B model as slow as the target": World(52, 9.2, 1.0, 50.0, (0.8,)),
    "1B head that writes trees, code": World(35, 11.0, 0.5, 7.5, (0.7,), ends=False),
    "free rows, batch of 16": World(30, 0.5, 1.0, 2.0, (0.7, 0.3), 16),
    "1B head, long prompts, batch of 4": World(24, 3.3, 0.5, 4.5, (0.55,), 4, prompt=600, catch_up=0.33),
    "small pair, slow start": World(0.2, 0.042, 0.02, 0.12, (0.7,), gap=0.2, slow_start=2.2),
    "small pair, slow start, batch of 8": World(0.25, 0.03, 0.03, 0.14, (0.75,), 8, gap=0.4, slow_start=2.2),
    "small pair, breaks even, dear rounds": World(1.4, 0.3, 0.4, 0.2, (0.55,), gap=0.3, more=0.9, cold=1.2),
    "small pair, pays, dear rounds": World(1.4, 0.3, 0.4, 0.2, (0.8,), gap=0.3, more=0.9, cold=1.2),
}


def make(world):
    policy = GoodputLength(12)
    policy.calibrate(world.measured)
    return policy


@pytest.fixture(scope="module")
def found():
    """Of each world: goodput's speed relative to plain decoding, and to the best fixed length."""
    ratios = {}
    for name, world in WORLDS.items():
        num_texts = max(24, 4 * world.batch)
        plain, *fixed = (decode(world, FixedLength(k), num_texts) for k in (0, *FIXED))
        own = decode(world, make(world), num_texts)
        ratios[name] = plain / own, min(plain, *fixed) / own
    return ratios


@pytest.mark.parametrize("name", WORLDS)
def test_never_slower_than_plain_and_near_the_best(name, found):
    over_plain, over_best = found[name]
    assert over_plain >= 0.98
    assert over_best >= 0.92


def test_mostly_as_fast_as_the_best(found):
    assert mean(best for _, best in found.values()) >= 0.98


def test_one_texts_rest_is_not_the_next_ones():
    """One text at a time, every other text easy: a pause caused by a hard text does not outlast it."""
    world = World(13.3, 1.86, 0.7, 2.1, (0.1, 0.95))
    assert decode(world, FixedLength(0), 64) > 1.3 * decode(world, make(world), 64)


@pytest.mark.parametrize("rate", [0.5, 0.6])
def test_rounds_with_drafts_do_not_make_plain_decoding_look_dear(rate):
    """After hundreds of rounds of texts that pay, and whose rounds cost more in all parts, other texts do not pay."""
    good = World(1.4, 0.3, 0.4, 0.2, (0.9,), gap=0.3, more=0.9, cold=1.2)
    policy = make(good)
    decode(good, policy, 48)
    poor = replace(good, rates=(rate,))
    assert decode(poor, FixedLength(0), 48) / decode(poor, policy, 48) >= 0.98


@pytest.mark.parametrize("cold", [1.4, 1.8])
def test_short_texts_do_not_hide_what_plain_rounds_cost(cold, monkeypatch):
    """Plain rounds are held for twice as dear. Neither prompts nor the cold caches after drafts confirm that."""
    monkeypatch.setitem(globals(), "LENGTH", 24)
    world = World(0.42, 0.14, 0.15, 0.12, (0.8,), 2, gap=0.25, more=0.1, prompt=60, prefills=True)
    world = replace(world, cold=cold, warming=0.6)
    policy = make(world)
    policy.cost.ratios |= {key: 2.0 for key in policy.cost.ratios if not key[0]}
    assert decode(world, FixedLength(0), 96) / decode(world, policy, 96) >= 0.98
