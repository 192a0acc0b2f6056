"""Laws 1 and 3 with rows from the prefix cache: every drafter, cache format and block size; tenants share nothing."""

import logging
import random
from dataclasses import replace
from functools import cache

import pytest
from lawkit import DRAFTERS, SAMPLED, finished, load_pair, make_engine, run, texts

from sameseed import LLM
from sameseed.kvcache.blocks import BlockManager
from sameseed.request import FinishReason, Request, SamplingParams, Sequence

NAMES = ["none", *DRAFTERS]
LENGTH = 14


def shared_prompts():
    """Eight prompts that share prefixes of 17, 32 or 40 tokens; two are equal, and one is a prefix of others."""
    rng = random.Random(5)
    base = [rng.randrange(1, 300) for _ in range(20)] * 2
    tails = [[rng.randrange(1, 300) for _ in range(n)] for n in (1, 9, 5, 3)]
    prompts = [base + t for t in tails] + [base[:17] + t * 2 for t in tails[1:3]]
    return [*prompts, list(prompts[0]), base[:32]]


PROMPTS = shared_prompts()
EACH = [
    SamplingParams(max_tokens=LENGTH, seed=7 + i, ignore_eos=True, **({}, SAMPLED, {"presence_penalty": 0.4})[i % 3])
    for i in range(len(PROMPTS))
]


def without_sharing(engine):
    engine.runner.blocks.shares = False
    return engine


@cache
def _load(target, draft):
    return load_pair(target, draft)


@pytest.fixture(scope="module", params=[("fp32", 16), ("int8", 4), ("int4", 5)], ids=str)
def plain(request, pair_folders):
    """The pair, a cache format and block size, and texts made without the prefix cache."""
    pair, (kv, block) = _load(*pair_folders), request.param
    engine = without_sharing(make_engine(pair, kv=kv))
    return pair, kv, block, texts(run(engine, PROMPTS, EACH, alone=True))


def hits(engine):
    return engine.runner.blocks.prefixes.num_hits


@pytest.mark.parametrize("name", NAMES)
def test_text_is_the_same_from_the_cache(plain, name):
    """In a batch, then one by one with the first run's cache; then with so few blocks that cached rows are evicted."""
    pair, kv, block, wanted = plain
    engine = make_engine(pair, name, k=5, kv=kv, block=block, rows=64)
    assert texts(run(engine, PROMPTS, EACH)) == wanted
    early = hits(engine)
    again = run(engine, PROMPTS, EACH, alone=True)
    assert texts(again) == wanted
    assert hits(engine) - early == sum(c.metrics.num_cached_tokens for c in again)
    assert [c.metrics.num_cached_tokens for c in again] == [(len(p) - 1) // block * block for p in PROMPTS]
    tight = make_engine(pair, name, k=5, kv=kv, rows=12, block=block, tokens=96, max_len=64)
    assert texts(run(tight, PROMPTS, EACH)) == wanted
    assert tight.scheduler.num_preemptions > 0
    assert texts(run(tight, PROMPTS, EACH)) == wanted


def test_a_draft_model_finds_its_own_rows_again(pair, spied):
    """With cached rows, the draft model's guesses are the same as without."""
    cold, warm = (make_engine(pair, "draft_model", k=5, block=4) for _ in range(2))
    run(warm, PROMPTS, EACH, alone=True)
    mine = warm.drafter.runner.blocks
    known = len(mine.prefixes)
    before = warm.metrics.copy()
    passes = spied(warm.drafter.runner, "forward", lambda seqs, draft, num_pending, *_, **more: max(num_pending))
    run(warm, PROMPTS, EACH, alone=True)
    without_sharing(cold).drafter.runner.blocks.shares = False
    run(cold, PROMPTS, EACH, alone=True)
    assert warm.metrics.since(before).as_dict() == cold.metrics.as_dict()
    assert known > 20
    assert max(passes) <= 2 * 4, "no prompt was computed anew"


def test_a_head_begins_where_the_target_computes(pair):
    """The head gets no hidden states for the skipped rows, but it still drafts."""
    engine = make_engine(pair, "eagle", k=5, block=4)
    run(engine, PROMPTS[:1], EACH[:1])
    drafted = engine.metrics.num_draft_tokens
    engine.add(Request("again", tuple(PROMPTS[0]), EACH[0], 0))
    engine.step()
    seq = engine.scheduler.running[0]
    assert seq.num_shared == 40
    assert engine.drafter.followers[seq].start == 40
    engine.step()
    assert engine.metrics.num_draft_tokens > drafted
    engine.abort("again")


@pytest.mark.parametrize("draft", ["none", "draft_model"])
def test_it_can_be_turned_off(pair_folders, draft):
    target, small = map(str, pair_folders)
    found = []
    for on in (True, False):
        drafting = {} if draft == "none" else {"draft": small, "policy": "fixed"}  # others may decide not to draft
        llm = LLM(target, **drafting, prefix_cache=on, max_num_seqs=2)
        params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        done = [llm.generate([PROMPTS[0]], params)[0] for _ in range(2)]
        assert done[0].token_ids == done[1].token_ids
        found.append([c.metrics.num_cached_tokens for c in done])
        runners = [llm.engine.runner, *([llm.engine.drafter.runner] if draft != "none" else [])]
        assert all(r.blocks.shares == on and bool(len(r.blocks.prefixes)) == on for r in runners)
    assert found == [[0, 32], [0, 0]]


def test_scoring_a_prompt_takes_nothing_from_the_cache(pair):
    engine, cold = make_engine(pair, block=4), without_sharing(make_engine(pair, block=4))
    run(engine, PROMPTS, EACH)
    params = SamplingParams(max_tokens=2, logprobs=3, ignore_eos=True)
    scored = []
    for each in (engine, cold):
        each.add(Request("s", tuple(PROMPTS[1]), params, 1, score_prompt=True))
        scored.append(finished(each)["s", 0])
    assert scored[0].metrics.num_cached_tokens == 0
    assert scored[0].prompt_logprobs == scored[1].prompt_logprobs
    assert len(scored[0].prompt_logprobs or ()) == len(PROMPTS[1]) - 1
    assert (scored[0].token_ids, scored[0].logprobs) == (scored[1].token_ids, scored[1].logprobs)


def test_numbers_that_are_not_finite_leave_the_cache(pair_folders):
    """The request ends with an error, and its prefix is computed again. A neighbour with that prefix is unaffected."""
    pair = load_pair(*pair_folders)
    engine = make_engine(pair, block=4)
    wanted = texts(run(engine, PROMPTS[:2], EACH[:2]))
    engine.add(Request("bad", tuple(PROMPTS[0]), EACH[0], EACH[0].seed or 0))
    engine.add(Request("good", tuple(PROMPTS[1]), EACH[1], EACH[1].seed or 0))
    engine.step()
    forward = engine.runner.forward

    def poisoned(seqs, draft, num_pending, *more, **named):
        out = forward(seqs, draft, num_pending, *more, **named)
        logits = out.logits.clone()
        logits[0] = float("nan")
        return replace(out, logits=logits)

    engine.runner.forward = poisoned
    ended = {d.request_id: d.completion for d in engine.step() if d.completion is not None}
    engine.runner.forward = forward
    assert [c.finish_reason for c in ended.values() if c] == [FinishReason.ERROR]
    assert finished(engine)["good", 0].token_ids == wanted[1]
    again = run(engine, PROMPTS[:1], EACH[:1])
    assert again[0].metrics.num_cached_tokens == 0, "all of its beginning is out, though another has it"
    assert texts(again) == wanted[:1]


@pytest.mark.failing_drafter
def test_a_sampler_that_fails_takes_its_prefix_along(pair, caplog):
    class Broken:
        def allowed(self, output, path):
            raise RuntimeError("a grammar that fails")

        def another(self):
            return self

    engine = make_engine(pair, block=4)
    run(engine, PROMPTS[:1], EACH[:1])
    with caplog.at_level(logging.CRITICAL):
        engine.add(Request("bad", tuple(PROMPTS[0]), EACH[0], 0, grammar=Broken()))
        finished(engine)
    assert run(engine, PROMPTS[:1], EACH[:1])[0].metrics.num_cached_tokens == 0


@pytest.mark.parametrize("ends", ["fail_step", "abort"])
def test_a_pass_that_fails_takes_its_prefixes_along(pair, monkeypatch, ends):
    engine = make_engine(pair, block=4)
    run(engine, PROMPTS[:1], EACH[:1])
    engine.add(Request("bad", tuple(PROMPTS[0]), EACH[0], 0))

    def broken(*args):
        raise RuntimeError("a kernel that fails")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", broken)
        with pytest.raises(RuntimeError):
            engine.step()
    if ends == "abort":
        engine.abort("bad")
    else:
        assert [d.completion.finish_reason for d in engine.fail_step(RuntimeError("it failed")) if d.completion] == [
            FinishReason.ERROR
        ]
    assert run(engine, PROMPTS[:1], EACH[:1])[0].metrics.num_cached_tokens == 0


def test_who_leaves_keeps_the_prefix_for_the_next(pair):
    engine = make_engine(pair, block=4)
    engine.add(Request("leaves", tuple(PROMPTS[0]), EACH[0], 0))
    engine.step()
    engine.abort("leaves")
    assert run(engine, PROMPTS[:1], EACH[:1])[0].metrics.num_cached_tokens == 40


Row = tuple[str, tuple[int, ...]]  # what a row depends on: its tenant, and all tokens up to this one
SALTS = ("", "a", "\udcff")  # the last: bytes of a command line that are no UTF-8
WRONG_GUESS = ("nobody", ())
MAX_SEQS, MAX_TOKENS = 5, 20
ACTIONS = {"add": 3, "start": 3, "adopt": 3, "compute": 3, "grow": 1, "take_back": 2, "compute_again": 1}
ACTIONS |= dict.fromkeys(("trim", "release", "fail"), 1)  # how often each is done


class Watched:
    """Sequences of a few tokens and tenants start, compute, guess, take back, leave and fail in a small cache.

    `memory` models what each row of the cache holds.
    """

    def __init__(self, rng):
        self.roll = rng.randint
        self.rng = rng
        self.blocks = BlockManager(self.roll(4, 20), self.roll(1, 3))
        self.memory: dict[int, Row] = {}  # by slot
        self.seqs: list[Sequence] = []
        self.failed: set[Row] = set()  # last rows of blocks that must not be found again
        self.num_added = self.num_saved = 0

    def act(self):
        """Do one action if it is possible, then check all rows and blocks."""
        name, which = self.rng.choices(list(ACTIONS), list(ACTIONS.values()))[0], self.roll(0, MAX_SEQS - 1)
        if name == "add":
            self.add()
        elif which < len(self.seqs):
            getattr(self, name)(self.seqs[which])
        self.check_rows()
        self.check_blocks()

    def some_tokens(self, most):
        return [self.roll(0, 1) for _ in range(self.roll(1, most))]

    def add(self):
        """Add a text of zeros with perhaps one 1, so that most texts share a prefix and look alike after it."""
        if len(self.seqs) < MAX_SEQS:
            other = self.roll(0, 15)
            tokens = [int(i == other) for i in range(self.roll(1, 14))]
            self.seqs.append(Sequence(self.num_added, tokens, SamplingParams(), 0, self.rng.choice(SALTS)))
            self.num_added += 1

    def start(self, seq):
        """Do what the scheduler does: start the sequence if it fits, then compute all its rows as certain ones."""
        if not seq.blocks and self.blocks.fits(seq, len(seq)):
            self.adopt(seq)
            assert self.blocks.reserve(seq, len(seq)), "it was said to fit"
            self.store(seq, len(seq), 0, True)

    def adopt(self, seq):
        before = seq.num_cached
        fits = self.blocks.fits(seq, len(seq)) if not seq.blocks else None
        saved = self.blocks.adopt(seq)
        assert seq.num_cached == before + saved
        assert seq.num_pending >= 1 or not saved, "somebody must compute the logits after the last token"
        self.num_saved += saved
        size = self.blocks.block_size
        found = {self.row(seq, i) for i in range(before // size * size + size - 1, seq.num_cached, size)}
        assert not saved or not found & self.failed, "what failed is found again"
        if fits is not None:
            assert self.blocks.reserve(seq, len(seq)) == fits

    def compute(self, seq):
        self.store(seq, min(seq.num_cached + self.roll(1, 9), len(seq)), self.roll(0, 3), self.roll(0, 3) > 0)

    def store(self, seq, end, guessed, certain):
        """Store pending rows up to `end`, and behind them rows of guesses that turn out wrong."""
        start, before, limit = seq.num_cached, list(seq.blocks), self.blocks.reservable(seq)
        granted = self.blocks.reserve(seq, end + guessed)
        assert granted == (end + guessed <= limit)
        assert seq.blocks[: len(before)] == before, "blocks that hold rows never move"
        assert len(seq.blocks) == max(len(before), self.blocks.blocks_for(end + guessed) if granted else 0)
        if not granted:
            return
        for i in range(start, end + guessed):
            self.memory[self.slot(seq, i)] = self.row(seq, i) if i < end else WRONG_GUESS
        seq.num_cached = end
        if certain:
            self.blocks.enter(seq, end)
            self.failed -= {self.row(seq, i) for i in range(end)}  # these rows were computed again

    def grow(self, seq):
        seq.token_ids += self.some_tokens(4)[: MAX_TOKENS - len(seq)]

    def take_back(self, seq):
        """Replace the last tokens, as in a drafter's copy of a sequence after wrong guesses."""
        keep = self.roll(1, 14)
        if keep < len(seq):
            del seq.token_ids[keep:]
            self.blocks.retract(seq, keep)
            assert seq.num_cached <= keep
            seq.token_ids += self.some_tokens(6)

    def compute_again(self, seq):
        keep = self.roll(0, 14)
        self.blocks.rewind(seq, keep)
        assert seq.num_cached <= keep

    def trim(self, seq):
        before = list(seq.blocks)
        self.blocks.trim(seq, len(seq))
        assert seq.blocks == before[: -(-len(seq) // self.blocks.block_size)]

    def release(self, seq):
        self.blocks.release(seq)
        assert (seq.blocks, seq.num_cached) == ([], 0)
        if self.roll(0, 1):
            self.seqs.remove(seq)

    def fail(self, seq):
        size = self.blocks.block_size
        self.failed |= {self.row(seq, i) for i in range(size - 1, len(seq.digests) * size, size)}
        self.blocks.forget(seq)
        self.blocks.release(seq)
        self.seqs.remove(seq)

    def row(self, seq, i):
        """What row i of a sequence should hold."""
        return seq.tenant, tuple(seq.token_ids[: i + 1])

    def slot(self, seq, i):
        size = self.blocks.block_size
        return seq.blocks[i // size] * size + i % size

    def check_rows(self):
        """Check that each cached row holds its own data: no others' tokens, no guesses, no data of a reused block."""
        for seq in self.seqs:
            for i in range(seq.num_cached):
                assert self.memory[self.slot(seq, i)] == self.row(seq, i)

    def check_blocks(self):
        blocks = self.blocks
        held = [b for seq in self.seqs for b in seq.blocks]
        free = blocks.free_blocks
        assert len(free) == len(set(free)) == blocks.num_free
        assert sorted({*held, *free}) == list(range(blocks.num_blocks)), "no block is lost"
        assert not set(held) & set(free), "no block is both free and owned"
        assert all(held.count(b) == n for b, n in enumerate(blocks._num_users))
        assert set(blocks._idle) == {b for b in free if b in blocks.prefixes}
        for seq in self.seqs:
            assert len(seq.blocks) == len(set(seq.blocks))
            assert seq.num_known * blocks.block_size <= seq.num_cached, "rows that will be written are not known"
            for b in seq.blocks[seq.num_known :]:
                assert held.count(b) == 1, "what may be written is nobody else's"
                assert b not in blocks.prefixes


def test_the_manager_keeps_everyones_rows_apart():
    rng, saved = random.Random(0), 0
    for _ in range(400):
        watched = Watched(rng)
        for _ in range(60):
            watched.act()
        for seq in watched.seqs:
            watched.blocks.release(seq)
        assert sorted(watched.blocks.free_blocks) == list(range(watched.blocks.num_blocks))
        saved += watched.num_saved
    assert saved > 500, "rows were shared"
