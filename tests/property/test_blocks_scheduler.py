"""Law 3: nothing leaks. A stateful test of the Scheduler, and the engine under aborts and exceptions."""

import math
import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lawkit import SAMPLED, assert_nothing_left, random_prompts

from sameseed import LLM
from sameseed.engine.scheduler import LEAST_ROWS, PATIENCE, Scheduler
from sameseed.kvcache.blocks import BlockManager
from sameseed.request import SamplingParams, Sequence


def check_ownership(blocks, seqs):
    """Every block is free or owned. Only a block of known rows may have several owners, and no block is lost."""
    held, free = Counter(b for seq in seqs for b in seq.blocks), blocks.free_blocks
    assert sorted([*held, *free]) == list(range(blocks.num_blocks))
    assert len(free) == blocks.num_free
    shared = {b for b, count in held.items() if count > 1}
    assert all(b in seq.blocks[: seq.num_known] for b in shared for seq in seqs if b in seq.blocks)


def prompt_seconds(num_rows, num_cached):
    return num_rows * (1.0 + num_cached / 8)


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, priorities, aborts and acceptance on a cache that is usually too small; texts share prefixes."""

    @initialize(
        block_size=st.integers(1, 6),
        max_model_len=st.integers(2, 40),
        spare=st.integers(0, 8),
        max_num_seqs=st.integers(1, 6),
        spare_rows=st.integers(0, 30),
        seconds=st.sampled_from((math.inf, 0.0, 30.0)),
    )
    def start(self, block_size, max_model_len, spare, max_num_seqs, spare_rows, seconds):
        longest = -(-max_model_len // block_size)
        self.blocks = BlockManager(longest + spare, block_size)
        self.scheduler = Scheduler(self.blocks, max_num_seqs + spare_rows, max_num_seqs, max_model_len)
        self.max_delay = seconds
        self.all: list[Sequence] = []
        self.open: list[Sequence] = []

    @rule(
        length=st.integers(1, 39),
        max_tokens=st.integers(1, 20),
        priority=st.sampled_from((0, 0, -3, 9)),
        tenant=st.sampled_from("ab"),
        owner=st.sampled_from("xyz"),
    )
    def add(self, length, max_tokens, priority, tenant, owner):
        length = min(length, self.scheduler.max_model_len - 1)
        seq = Sequence(len(self.all), [1] * length, SamplingParams(max_tokens=max_tokens), 0, tenant)
        seq.priority, seq.owner, seq.max_delay = priority, owner, self.max_delay
        self.all.append(seq)
        self.open.append(seq)
        self.scheduler.add(seq)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def step(self, data):
        self.pass_once(lambda high: data.draw(st.integers(0, high)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data):
        seq = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.scheduler.finish(seq)
        assert seq.blocks == []

    def pass_once(self, pick):
        """Schedule, check the plan, and decode with a random number of accepted tokens."""
        s = self.scheduler
        before = list(s.running)
        wanted = {}

        def lengths(seqs, num_rows, budget):
            wanted.update((seq.seq_id, pick(9)) for seq in seqs)
            return [wanted[seq.seq_id] for seq in seqs]

        streams = any(seq.num_output > 0 and seq.num_pending == 1 for seq in s.running)
        plan = s.schedule(lengths, prompt_seconds)
        assert plan.seqs, "with work to do, every pass does some"
        assert plan.num_rows <= s.max_num_rows
        assert len(s.running) <= s.max_num_seqs
        assert plan.seqs == s.running, "a running sequence gets a row"
        assert all(seq in s.running or seq in s.waiting for seq in before), "or was preempted"
        if before:
            assert before[0] in s.running, "the first in rank is never preempted"
        limited = streams and self.max_delay < math.inf
        if limited:  # beyond one row of each sequence
            added = sum(
                prompt_seconds(n - 1, seq.num_cached) for seq, n in zip(plan.seqs, plan.num_pending, strict=True)
            )
            least = max((prompt_seconds(LEAST_ROWS, seq.num_cached) for seq in plan.seqs), default=0.0)
            assert added <= max(self.max_delay, least) + 1e-9
        for seq, num_pending, num_draft in zip(plan.seqs, plan.num_pending, plan.num_draft, strict=True):
            assert 1 <= num_pending <= seq.num_pending
            if num_pending < seq.num_pending and plan.num_rows < s.max_num_rows and not limited:
                end = seq.num_cached + num_pending
                assert s.blocks.reservable(seq) == end, "no row stays empty while a prompt waits for it"
            assert 0 <= num_draft <= wanted.get(seq.seq_id, 0)
            assert len(seq.blocks) * self.blocks.block_size >= seq.num_cached + num_pending + num_draft
            if num_draft:
                assert num_pending == seq.num_pending
                assert seq.num_output > 0
                assert seq.draft_depth > 0, "nothing for the last token"
        for seq, num_pending, num_draft in zip(plan.seqs, plan.num_pending, plan.num_draft, strict=True):
            self.decode(seq, num_pending, pick(min(num_draft, seq.draft_depth)))  # may finish and free its blocks
        check_ownership(self.blocks, self.all)

    def decode(self, seq, num_pending, num_accepted):
        seq.num_cached += num_pending
        self.blocks.enter(seq, seq.num_cached)
        seq.num_cached += num_accepted
        if seq.num_cached - num_accepted < len(seq):
            return  # a chunk of the prompt
        seq.token_ids += [1] * (num_accepted + 1)
        assert len(seq) <= self.scheduler.max_model_len
        assert seq.num_output <= seq.params.max_tokens
        if seq.num_output == seq.params.max_tokens or len(seq) == self.scheduler.max_model_len:
            self.scheduler.finish(seq)
            self.open.remove(seq)
        else:
            self.blocks.trim(seq, len(seq))

    @invariant()
    def known_and_owned(self):
        if not hasattr(self, "scheduler"):
            return
        s = self.scheduler
        check_ownership(self.blocks, self.all)
        assert sorted(q.seq_id for q in (*s.running, *s.waiting)) == sorted(q.seq_id for q in self.open)
        assert all(q.num_cached == 0 and not q.blocks for q in s.waiting)
        assert s.has_work == bool(self.open)

    def teardown(self):
        """No starvation: all finish, in the worst case with one token per pass. Then every block is free."""
        if not hasattr(self, "scheduler"):
            return
        rng = random.Random(len(self.all))
        # A later sequence of higher priority, or one that was passed over too often, may preempt the first one.
        ways = 1 + len({q.priority for q in self.open})
        limit = sum(len(q) + q.params.max_tokens + 1 for q in self.open) * ways
        for _ in range(limit):
            if not self.open:
                break
            self.pass_once(lambda high: rng.randint(0, high))
        assert not self.open
        assert self.blocks.num_free == self.blocks.num_blocks


def decode_all(scheduler, waits_for, arrive, limit):
    """Run passes of one token each until one sequence ends, while others keep arriving."""
    for number in range(limit):
        for seq in arrive(number):
            scheduler.add(seq)
        plan = scheduler.schedule(lambda seqs, rows, budget: [0] * len(seqs))
        for seq, num_pending in zip(plan.seqs, plan.num_pending, strict=True):
            seq.num_cached += num_pending
            if not seq.num_pending:
                seq.token_ids.append(1)
            if seq.num_output == seq.params.max_tokens:
                scheduler.finish(seq)
                if seq is waits_for:
                    return number
    raise AssertionError("it starves")


@pytest.mark.parametrize("seed", range(8))
def test_no_one_starves(seed):
    """At most PATIENCE later sequences of higher priority go before it, and as many before each earlier one."""
    rng = random.Random(seed)
    longest, most = 24, 8
    blocks = BlockManager(rng.randint(8, 20), 4)
    scheduler = Scheduler(blocks, rng.randint(4, 24), rng.randint(1, 4), longest + most)
    made = 0

    def sequence(priority):
        nonlocal made
        made += 1
        seq = Sequence(made, [made] * rng.randint(1, longest), SamplingParams(max_tokens=rng.randint(1, most)), 0)
        seq.priority, seq.owner = priority, rng.choice("abcd"[: 1 + seed % 4])
        return seq

    before = [sequence(rng.randint(-2, 2)) for _ in range(rng.randint(0, 5))]
    for seq in before:
        scheduler.add(seq)
    poor = sequence(1000)
    scheduler.add(poor)
    work = longest + most + 1
    bound = work * (len(before) + 1) * (1 + PATIENCE) * 2
    assert decode_all(scheduler, poor, lambda number: [sequence(-1000), sequence(0)], bound) < bound


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40)


FAULTS = ["propose", "forward", "verify", "commit", "observe", "deliver"]


@pytest.mark.parametrize("fault", FAULTS)
def test_interrupt_anywhere_in_a_step(pair_folders, monkeypatch, fault):
    """Ctrl-C during generation raises, every block is free, and the LLM serves the next request as before."""
    target, draft = map(str, pair_folders)
    llm = LLM(target, draft=draft, policy="fixed", max_num_seqs=4)
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, **SAMPLED)
    prompts = random_prompts(5, seed=8)
    whole = [c.token_ids for c in llm.generate(prompts, params)]
    places = {
        "propose": (llm.engine.drafter, "propose"), "forward": (llm.engine.runner, "forward"),
        "verify": (__import__("sameseed.spec.step", fromlist=["step"]), "verify"),
        "commit": (llm.engine.runner, "commit"), "observe": (llm.engine.drafter, "observe"),
        "deliver": (llm.engine, "_take"),
    }  # fmt: skip
    owner, name = places[fault]
    original, calls = getattr(owner, name), []

    def interrupt(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params)
    assert_nothing_left(llm.engine)
    assert [c.token_ids for c in llm.generate(prompts, params)] == whole
    assert_nothing_left(llm.engine)


def test_a_closed_stream_frees_its_blocks(pair_folders):
    llm = LLM(str(pair_folders[0]), draft=str(pair_folders[1]))
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert llm.engine.runner.blocks.num_free < llm.engine.runner.blocks.num_blocks
    stream.close()
    assert_nothing_left(llm.engine)
