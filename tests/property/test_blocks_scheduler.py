"""Law 3: nothing leaks. Stateful tests of BlockManager and Scheduler; the engine under aborts and exceptions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lawkit import SAMPLED, Pair, assert_nothing_left, make_engine, random_prompts

from foretoken import LLM
from foretoken.engine.scheduler import Scheduler
from foretoken.kvcache.blocks import BlockManager
from foretoken.request import Completion, FinishReason, Request, SamplingParams, Sequence


def check_ownership(blocks: BlockManager, seqs: list[Sequence]) -> None:
    """Every block is free or belongs to one sequence, and none is lost."""
    held = [b for seq in seqs for b in seq.blocks] + blocks.free_blocks
    assert sorted(held) == list(range(blocks.num_blocks))
    assert blocks.num_free == blocks.num_blocks - sum(len(seq.blocks) for seq in seqs)


class BlockMachine(RuleBasedStateMachine):
    """Random reservations of several sequences."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.seqs = [Sequence(i, [1], SamplingParams(), 0) for i in range(4)]

    @rule(i=st.integers(0, 3), num_rows=st.integers(0, 70))
    def reserve(self, i: int, num_rows: int) -> None:
        seq, size = self.seqs[i], self.blocks.block_size
        before, limit = list(seq.blocks), self.blocks.reservable(seq)
        granted = self.blocks.reserve(seq, num_rows)
        assert granted == (num_rows <= limit)
        assert seq.blocks[: len(before)] == before, "blocks that hold rows never move"
        if granted:
            assert len(seq.blocks) == max(len(before), -(-num_rows // size))
        else:
            assert seq.blocks == before

    @rule(i=st.integers(0, 3), num_rows=st.integers(0, 70))
    def trim(self, i: int, num_rows: int) -> None:
        seq, before = self.seqs[i], list(self.seqs[i].blocks)
        self.blocks.trim(seq, num_rows)
        assert seq.blocks == before[: -(-num_rows // self.blocks.block_size)]

    @rule(i=st.integers(0, 3))
    def release(self, i: int) -> None:
        self.seqs[i].num_cached = 3
        self.blocks.release(self.seqs[i])
        assert self.seqs[i].blocks == []
        assert self.seqs[i].num_cached == 0

    @invariant()
    def owned_once(self) -> None:
        check_ownership(self.blocks, self.seqs)


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, aborts and acceptance on a cache that is usually too small."""

    @initialize(
        block_size=st.integers(1, 6),
        max_model_len=st.integers(2, 40),
        spare=st.integers(0, 8),
        max_num_seqs=st.integers(1, 6),
        spare_rows=st.integers(0, 30),
    )
    def start(self, block_size: int, max_model_len: int, spare: int, max_num_seqs: int, spare_rows: int) -> None:
        longest = -(-max_model_len // block_size)
        self.blocks = BlockManager(longest + spare, block_size)
        self.scheduler = Scheduler(self.blocks, max_num_seqs + spare_rows, max_num_seqs, max_model_len)
        self.all: list[Sequence] = []
        self.open: list[Sequence] = []

    @rule(length=st.integers(1, 39), max_tokens=st.integers(1, 20))
    def add(self, length: int, max_tokens: int) -> None:
        length = min(length, self.scheduler.max_model_len - 1)
        seq = Sequence(len(self.all), [1] * length, SamplingParams(max_tokens=max_tokens), 0)
        self.all.append(seq)
        self.open.append(seq)
        self.scheduler.add(seq)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.pass_once(lambda high: data.draw(st.integers(0, high)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.scheduler.finish(seq)
        assert seq.blocks == []

    def pass_once(self, pick: Any) -> None:
        """Schedule, check the plan, and decode with a random number of accepted tokens."""
        s = self.scheduler
        before = list(s.running)
        wanted: dict[int, int] = {}

        def lengths(seqs: Any, num_rows: int, budget: int) -> list[int]:
            wanted.update((seq.seq_id, pick(9)) for seq in seqs)
            return [wanted[seq.seq_id] for seq in seqs]

        plan = s.schedule(lengths)
        assert plan.seqs, "with work to do, every pass does some"
        assert plan.num_rows <= s.max_num_rows
        assert len(s.running) <= s.max_num_seqs
        assert plan.seqs == s.running, "a running sequence gets a row"
        assert all(seq in s.running or seq in s.waiting for seq in before), "or was preempted"
        if before:
            assert s.running[0] is before[0], "the oldest is never preempted"
        for seq, num_pending, num_draft in zip(plan.seqs, plan.num_pending, plan.num_draft, strict=True):
            assert 1 <= num_pending <= seq.num_pending
            assert 0 <= num_draft <= wanted.get(seq.seq_id, 0)
            assert len(seq.blocks) * self.blocks.block_size >= seq.num_cached + num_pending + num_draft
            if num_draft:
                assert num_pending == seq.num_pending
                assert seq.num_output > 0
                assert seq.draft_depth > 0, "nothing for the last token"
            self.decode(seq, num_pending, pick(min(num_draft, seq.draft_depth)))
        check_ownership(self.blocks, self.all)

    def decode(self, seq: Sequence, num_pending: int, num_accepted: int) -> None:
        seq.num_cached += num_pending + num_accepted
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
    def known_and_owned(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        s = self.scheduler
        check_ownership(self.blocks, self.all)
        assert sorted(q.seq_id for q in (*s.running, *s.waiting)) == sorted(q.seq_id for q in self.open)
        assert all(q.num_cached == 0 and not q.blocks for q in s.waiting)
        assert s.has_work == bool(self.open)

    def teardown(self) -> None:
        """No starvation: all finish, at one token a pass of the oldest at the worst; then every block is free."""
        if not hasattr(self, "scheduler"):
            return
        rng = random.Random(len(self.all))
        limit = sum(len(q) + q.params.max_tokens + 1 for q in self.open)
        for _ in range(limit):
            if not self.open:
                break
            self.pass_once(lambda high: rng.randint(0, high))
        assert not self.open
        assert self.blocks.num_free == self.blocks.num_blocks


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40)


# --- the engine ---

SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"method": "ngram", "options": {"min_ngram": 1}},
    "draft_model": {"method": "draft_model", "k": 5},
}


@pytest.mark.parametrize("spec", SPECS)
def test_random_aborts_leave_nothing(pair: Pair, spec: str) -> None:
    rng = random.Random(spec)
    prompts = random_prompts(40, seed=2)
    engine = make_engine(pair, **SPECS[spec], rows=40, block=8, tokens=256, max_len=120)
    ended: dict[str, FinishReason] = {}
    aborted: list[Completion] = []

    def note(deltas: Any) -> None:
        for d in deltas:
            if d.completion is not None:
                ended[d.request_id] = d.completion.finish_reason
                aborted.extend([d.completion] if d.completion.finish_reason is FinishReason.ABORT else [])

    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=i, **(SAMPLED if i % 2 else {}))
        engine.add(Request(f"r{i}", tuple(prompt), params, i))
        for _ in range(rng.randint(0, 3)):
            note(engine.step())
        if rng.random() < 0.5:
            victim = rng.randint(0, i)
            note(engine.abort(f"r{victim}"))
            assert all(r.request.request_id != f"r{victim}" for r in engine._live.values())
        check_ownership(engine.runner.blocks, [r.seq for r in engine._live.values()])
    while engine.has_work:
        note(engine.step())
    assert ended.keys() == {f"r{i}" for i in range(40)}
    assert {FinishReason.LENGTH, FinishReason.ABORT} == set(ended.values())
    assert any(c.token_ids for c in aborted), "what an aborted request had written is given out"
    assert engine.abort("r0") == [], "an id that is gone does nothing"
    assert_nothing_left(engine)


FAULTS = ["propose", "forward", "verify", "commit", "observe", "deliver"]


@pytest.mark.parametrize("fault", FAULTS)
def test_interrupt_anywhere_in_a_step(pair_folders: tuple[Path, Path], monkeypatch: Any, fault: str) -> None:
    """Ctrl-C in mid-generation: it comes through, every block is free, and the LLM serves the next request as ever."""
    target, draft = map(str, pair_folders)
    llm = LLM(target, draft=draft, max_num_seqs=4)
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, **SAMPLED)
    prompts = random_prompts(5, seed=8)
    whole = [c.token_ids for c in llm.generate(prompts, params)]
    places: dict[str, tuple[Any, str]] = {
        "propose": (llm.engine.drafter, "propose"),
        "forward": (llm.engine.runner, "forward"),
        "verify": (__import__("foretoken.spec.step", fromlist=["step"]), "verify"),
        "commit": (llm.engine.runner, "commit"),
        "observe": (llm.engine.drafter, "observe"),
        "deliver": (llm.engine, "_deliver"),
    }
    owner, name = places[fault]
    original, calls = getattr(owner, name), []

    def interrupt(*args: Any, **kwargs: Any) -> Any:
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


def test_a_closed_stream_frees_its_blocks(pair_folders: tuple[Path, Path]) -> None:
    llm = LLM(str(pair_folders[0]), draft=str(pair_folders[1]))
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert llm.engine.runner.blocks.num_free < llm.engine.runner.blocks.num_blocks
    stream.close()
    assert_nothing_left(llm.engine)


def test_nobody_sees_anothers_tokens(pair: Pair) -> None:
    """Blocks are handed on without being wiped; what the last owner left in them must not matter."""
    prompts = random_prompts(6, seed=11)
    params = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)
    used = make_engine(pair, "draft_model", tokens=160, max_len=72, block=8)
    for name, prompt in enumerate(prompts * 2):
        fresh = make_engine(pair, "draft_model", tokens=160, max_len=72, block=8)
        outputs = []
        for engine in (fresh, used):
            engine.add(Request(str(name), tuple(prompt), params, 1))
            while engine.has_work:
                outputs += [d.completion.token_ids for d in engine.step() if d.completion is not None]
        assert outputs[0] == outputs[1]
    assert_nothing_left(used)
