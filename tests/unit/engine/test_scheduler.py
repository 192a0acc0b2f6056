"""The Scheduler by example: what it gives up first. Its laws are in property/test_blocks_scheduler.py."""

import math
import random

import pytest

from sameseed.cost.running import PromptCost
from sameseed.engine.scheduler import LEAST_ROWS, PATIENCE, Scheduler
from sameseed.kvcache.blocks import BlockManager
from sameseed.request import SamplingParams, Sequence


def sequence(name, length, max_tokens=50, seconds=math.inf):
    return Sequence(name, [1] * length, SamplingParams(max_tokens=max_tokens), 0, max_delay=seconds)


def make(num_blocks=100, rows=64, seqs=8, max_len=200):
    return Scheduler(BlockManager(num_blocks, 4), rows, seqs, max_len)


def eight_ms_a_row(num_rows, num_cached):
    return num_rows / 128


def run(scheduler, k=0, accepted=0, cost=eight_ms_a_row):
    """One pass in which every sequence wants `k` draft tokens, `accepted` of which are right."""
    plan = scheduler.schedule(lambda seqs, rows, budget: [k] * len(seqs), cost)
    for seq, num_pending, num_draft in zip(plan.seqs, plan.num_pending, plan.num_draft, strict=True):
        done = num_pending == seq.num_pending
        seq.num_cached += num_pending
        if done:
            good = min(accepted, num_draft)
            seq.num_cached += good
            seq.token_ids += [1] * (good + 1)
            scheduler.blocks.trim(seq, len(seq))
    return plan


def shape(plan):
    return [(s.seq_id, p, d) for s, p, d in zip(plan.seqs, plan.num_pending, plan.num_draft, strict=True)]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    scheduler = make(rows=16)
    scheduler.add(sequence(0, 100))
    assert shape(run(scheduler)) == [(0, 16, 0)], "alone it gets all"
    scheduler.add(sequence(1, 3))
    assert shape(run(scheduler)) == [(0, 13, 0), (1, 3, 0)], "a quarter is kept, and what nobody needs is given back"
    scheduler.add(sequence(2, 20))
    scheduler.add(sequence(3, 20))
    plan = shape(run(scheduler))
    assert plan == [(0, 12, 0), (1, 1, 0), (2, 3, 0)], "the first gets most, the next what is kept"


def test_a_long_prompt_adds_little_to_a_pass_while_others_stream():
    scheduler = make(num_blocks=400, rows=64, max_len=500)
    scheduler.add(sequence(0, 4, seconds=0.25))
    run(scheduler)
    scheduler.add(sequence(1, 400, seconds=0.25))
    assert shape(run(scheduler, k=4)) == [(0, 1, 4), (1, 32, 0)], "32 rows take 0.25 s; drafts go on"
    scheduler.add(sequence(2, 3, seconds=0.25))
    assert shape(run(scheduler)) == [(0, 1, 0), (1, 30, 0), (2, 3, 0)], "a short prompt need not wait"
    scheduler.add(sequence(3, 100))
    run(scheduler)
    plan = {name: rows for name, rows, _ in shape(run(scheduler))}
    assert plan[1] > plan[3] >= 3, "a quarter of the time is left to prompts behind it"
    for seq in scheduler.running[:]:
        if seq.seq_id in (0, 2):
            scheduler.finish(seq)
    assert sum(rows for _, rows, _ in shape(run(scheduler))) == 64, "nobody reads along: full passes"


@pytest.mark.parametrize(("lengths", "rows"), [((200, 2), (LEAST_ROWS - 2, 2)), ((1,), (1,))])
def test_a_prompt_goes_on_whatever_its_rows_cost(lengths, rows):
    scheduler = make(num_blocks=400, seqs=3, max_len=500)
    scheduler.add(sequence(0, 4, seconds=0.01))
    run(scheduler)
    for name, length in enumerate(lengths, 1):
        scheduler.add(sequence(name, length))
    assert tuple(run(scheduler, cost=lambda rows, cached: rows).num_pending) == (1, *rows)


@pytest.mark.parametrize(("row", "seed"), [(1e-5, 0), (6e-4, 1), (4e-3, 2)])
def test_the_cost_of_prompts_is_learned_from_passes(row, seed):
    """Passes of a simulated machine: few rows are nearly free, noise of 20 %, a context of 2,000 doubles the cost."""
    rng = random.Random(seed)
    scheduler, cost = make(num_blocks=5000, rows=512, max_len=9000), PromptCost(0.1)

    def step():
        plan = run(scheduler, cost=cost.seconds)
        chunks = [(n, s.num_cached - n) for s, n in zip(plan.seqs, plan.num_pending, strict=True) if n > 1]
        added = sum(row * max(0, n - 8) * (1 + (cached + n / 2) / 2000) for n, cached in chunks)
        added *= rng.uniform(0.8, 1.2)
        if chunks:
            cost.learn(chunks, 0.005 + added)
        else:
            cost.passed(0.005)
        return plan, added

    for name in range(60):  # short prompts must not hide what rows of long ones cost
        scheduler.add(sequence(name, 20, max_tokens=1))
        step()
        scheduler.finish(scheduler.running[0])
    scheduler.add(sequence(100, 4, max_tokens=8000, seconds=0.1))
    step()
    for name in (101, 102):
        long = sequence(name, 8000)
        scheduler.add(long)
        longest, passes = 0.0, 0
        while long.num_output == 0:
            longest, passes = max(longest, step()[1]), passes + 1
        ideal = sum(row * (1 + t / 2000) for t in range(8000))
        assert longest <= 0.16
        assert passes <= 12 + 1.3 * max(8000 / 511, ideal / 0.1), "and no slower than need be"
        scheduler.finish(long)


def test_drafts_share_the_rows_that_are_left():
    scheduler = make(rows=9)
    for name in range(3):
        scheduler.add(sequence(name, 2))
    run(scheduler)
    assert shape(run(scheduler, k=4)) == [(0, 1, 4), (1, 1, 2), (2, 1, 0)]


def test_drafts_are_given_up_before_sequences():
    scheduler = make(num_blocks=4, max_len=16)
    for name in range(2):
        scheduler.add(sequence(name, 7))  # two blocks each: there is room for the eighth token
    run(scheduler)
    assert shape(run(scheduler, k=5)) == [(0, 1, 0), (1, 1, 0)], "no block is left for drafts"
    assert scheduler.num_preemptions == 0


def test_the_youngest_is_preempted_and_comes_back_first():
    scheduler = make(num_blocks=4, max_len=16)
    old, young, late = sequence(0, 7), sequence(1, 7), sequence(2, 2)
    for seq in (old, young, late):
        scheduler.add(seq)
    run(scheduler)
    run(scheduler)
    assert len(old) == 9
    assert shape(run(scheduler)) == [(0, 1, 0)]
    assert list(scheduler.waiting) == [young, late]
    assert (young.num_cached, young.blocks, young.num_preemptions) == (0, [], 1)
    assert young.num_pending == len(young) == 9, "all its tokens are pending again"
    scheduler.finish(old)
    plan = run(scheduler)
    assert shape(plan) == [(1, 9, 0), (2, 2, 0)]
    assert scheduler.num_preemptions == 1


def test_a_sequence_waits_until_it_fits_whole():
    scheduler = make(num_blocks=5, max_len=20)
    scheduler.add(sequence(0, 8))
    run(scheduler)
    scheduler.add(sequence(1, 8))  # with its first token it needs three blocks; two are free
    assert shape(run(scheduler)) == [(0, 1, 0)]
    scheduler.add(sequence(2, 1))
    assert shape(run(scheduler)) == [(0, 1, 0)], "first come, first served"


def test_depth_ends_where_the_text_does_and_nodes_do_not():
    scheduler = make(max_len=12)
    one, two = sequence(0, 3, max_tokens=5), sequence(1, 8)
    scheduler.add(one)
    scheduler.add(two)
    run(scheduler)
    assert (one.draft_depth, two.draft_depth) == (3, 2)
    assert shape(run(scheduler, k=9)) == [(0, 1, 9), (1, 1, 9)], "a tree may be broad"
    assert (one.draft_depth, two.draft_depth) == (2, 1)
    run(scheduler)
    assert (one.draft_depth, two.draft_depth) == (1, 0)
    assert shape(run(scheduler, k=9)) == [(0, 1, 9), (1, 1, 0)], "nothing for the last token"


def owned(name, owner, priority=0, length=2):
    seq = sequence(name, length, max_tokens=2)
    seq.owner, seq.priority = owner, priority
    return seq


def order(scheduler):
    """The order in which sequences start, each writing two tokens, until none is left."""
    started = []
    while scheduler.has_work:
        plan = run(scheduler)
        started += [seq.seq_id for seq in plan.seqs if seq.seq_id not in started]
        for seq in plan.seqs:
            if seq.num_output >= seq.params.max_tokens:
                scheduler.finish(seq)
    return started


@pytest.mark.parametrize("seats", [1, 4])
def test_a_flood_of_one_owner_keeps_no_other_waiting(seats):
    scheduler = make(seqs=seats)
    for name in range(20):
        scheduler.add(owned(name, "flood"))
    started = [seq.seq_id for seq in run(scheduler).seqs]
    for name in (100, 101, 102):
        scheduler.add(owned(name, "other"))
    started += [name for name in order(scheduler) if name not in started]
    assert [name for name in started if name < 100] == list(range(20)), "by arrival within an owner"
    if seats == 1:
        assert started[:7] == [0, 100, 1, 101, 2, 102, 3], "one place: by turns"
    else:
        assert started[:12] == [0, 1, 2, 3, 100, 4, 101, 5, 102, 6, 7, 8], "half the places each, while there is use"


def test_turns_are_of_equals_only():
    scheduler = make(seqs=1)
    for name, owner, priority in ((0, "a", 0), (1, "a", 0), (2, "a", 0), (3, "b", 1), (4, "b", -1)):
        scheduler.add(owned(name, owner, priority))
    assert order(scheduler) == [4, 0, 1, 2, 3]


def test_turns_use_up_nobodys_patience():
    """Turns do not use up patience: otherwise the rest of a flood would go first after a few turns of others."""
    scheduler = make(seqs=1)
    for name in range(PATIENCE + 20):
        scheduler.add(owned(name, "flood"))
    for name in range(100, 100 + PATIENCE + 10):
        scheduler.add(owned(name, "other"))
    started = order(scheduler)
    assert started[: 2 * PATIENCE : 2] == list(range(PATIENCE))
    assert started[1 : 2 * PATIENCE : 2] == list(range(100, 100 + PATIENCE))


def test_who_was_let_in_by_turn_is_not_preempted_by_who_came_earlier():
    """Blocks suffice for three or four sequences, and all sequences grow; one owner's backlog comes first."""
    scheduler = make(num_blocks=14, rows=16, max_len=40, seqs=4)

    def grows(name, owner):
        seq = sequence(name, 4, max_tokens=16)
        seq.owner = owner
        return seq

    for name in range(12):
        scheduler.add(grows(name, "backlog"))
    for _ in range(3):
        run(scheduler)
    late = grows(100, "late")
    scheduler.add(late)
    ended = []
    first = []
    while scheduler.has_work:
        first = scheduler.running[:1]
        plan = run(scheduler)
        assert set(first) <= set(plan.seqs), "who started first goes on"
        for seq in plan.seqs:
            if seq.num_output >= 16:
                scheduler.finish(seq)
                ended.append(seq.seq_id)
    assert scheduler.num_preemptions > 4, "else this shows nothing"
    assert late.num_preemptions <= 1
    assert ended.index(100) <= 5
