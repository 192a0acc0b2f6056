"""Drafting ahead: the same drafts and texts, at other times; a failure costs only the guess."""

import logging
import random
import threading
from contextlib import contextmanager

import pytest
from lawkit import SAMPLED, Pair, Tireless, make_engine, random_prompts, run, texts

from sameseed import LLM, SpecConfig, ops
from sameseed.engine.build import check_parts
from sameseed.engine.levels import Level, resolve
from sameseed.engine.overlap import Overlap
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter

PROMPTS = random_prompts(6, seed=8)
ASKED = {
    "greedy": SamplingParams(max_tokens=40, seed=2, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=40, seed=2, ignore_eos=True, **SAMPLED),
    "penalties": SamplingParams(max_tokens=40, seed=2, temperature=0.5, frequency_penalty=0.6, repetition_penalty=1.2),
}


class Inline(Overlap):
    """Drafts ahead in the same thread for a random number of passes: the outcomes of a race, but reproducible."""

    def __init__(self, most, seed=0):
        super().__init__(1)
        self.most = most
        self.random = random.Random(seed)

    @contextmanager
    def beside(self, drafter, seqs, draft, num_draft):
        self._drafted = ()
        if len(draft.tokens):
            left = iter(range(self.random.randint(0, self.most)))
            self._drafted = drafter.ahead(seqs, draft, num_draft, lambda: next(left, None) is not None)
        yield lambda: None


def patient(engine):
    """Makes the engine's target slow: each of its passes waits until drafting ahead has ended."""
    ahead = engine.ahead = Tireless(1)
    forward = engine.runner.forward

    def slow(*args, **more):
        ahead._worker.submit(lambda: None).result()  # there is one worker: earlier work has ended
        return forward(*args, **more)

    engine.runner.forward = slow
    return engine


def drafted(metrics):
    return metrics.num_rounds, metrics.num_draft_tokens, metrics.num_accepted_tokens_per_pos, metrics.num_rollbacks


@pytest.mark.parametrize(
    ("asked", "setting"),
    [
        *(
            ("greedy", {"k": 1}), ("sampled", {"k": 4}), ("greedy", {"k": 6, "confidence": 0.3}),
            ("penalties", {"k": 4}),
        ),
        *((asked, {"k": 4, "block": 4, "rows": 20, "tokens": 256}) for asked in ASKED),
    ],
    ids=str,
)  # fmt: skip
def test_the_same_drafts_at_other_times(pair, asked, setting):
    """Not only texts: proposed and accepted tokens are the same, however far drafting ahead got."""
    waiting = make_engine(pair, "draft_model", **setting)
    engine = make_engine(pair, "draft_model", **setting)
    engine.ahead = Inline(2 * setting["k"])
    assert texts(run(engine, PROMPTS, ASKED[asked])) == texts(run(waiting, PROMPTS, ASKED[asked]))
    if "tokens" not in setting:  # if blocks run short, those taken ahead may cost a draft
        assert drafted(engine.metrics) == drafted(waiting.metrics)
    assert 0 < engine.metrics.num_ahead_kept < engine.metrics.num_ahead, "some suppositions held, some did not"
    assert waiting.metrics.num_ahead == 0


def test_what_is_ready_is_not_drafted_again(pair, spied):
    """With a draft that is always right, all draft passes after the first round run beside the target."""
    engine = patient(make_engine(Pair(pair.target, pair.target, pair.tokenizer), "draft_model", k=5))
    runner = engine.drafter.runner
    runner.grow = lambda *_: None  # a pass a token, to be counted
    threads = spied(runner, "forward", lambda *args, **more: threading.get_ident())
    done = run(engine, PROMPTS[:1], SamplingParams(max_tokens=61, seed=1, ignore_eos=True))
    spec = done[0].metrics.spec
    assert (spec.num_drafts, spec.acceptance_rate) == (10, 1.0)
    assert spec.num_ahead == spec.num_ahead_kept == spec.num_drafts
    here = threads.count(threading.get_ident())
    assert here == 5
    assert len(threads) - here >= 9 * 6
    assert done[0].metrics.as_dict()["num_ahead_kept"] == 10


def test_a_failure_costs_a_guess(pair, caplog):
    """A pass ahead that fails, wherever it does, changes no text, leaves nothing behind and is logged once."""
    engine = patient(make_engine(pair, "draft_model", k=4))
    runner, here, rng = engine.drafter.runner, threading.get_ident(), random.Random(1)
    forward, broken = runner.forward, []

    def fragile(*args, **more):
        if threading.get_ident() != here and rng.random() < 0.2:
            broken.append(1)
            raise MemoryError("no room")
        return forward(*args, **more)

    runner.forward = fragile
    with caplog.at_level(logging.ERROR):
        done = run(engine, PROMPTS, ASKED["sampled"])
    assert texts(done) == texts(run(make_engine(pair), PROMPTS, ASKED["sampled"]))
    assert len(broken) > 3
    assert len(caplog.records) == 1
    assert "no room" in caplog.text
    waiting = make_engine(pair, "draft_model", k=4)
    run(waiting, PROMPTS, ASKED["sampled"])
    assert drafted(engine.metrics) == drafted(waiting.metrics)


def test_a_target_that_fails_waits_for_the_drafter(pair):
    """After an interrupted target pass, nothing runs beside it any more, and the thread's limit is restored."""
    engine = make_engine(pair, "draft_model", k=4)
    engine.ahead = ahead = Overlap(1)
    running = threading.Event()

    class Slow(Drafter):
        def ahead(self, seqs, draft, num_draft, going):
            running.set()
            while going():
                pass
            running.clear()
            return [[1]]

    seq = Sequence(0, [1, 2], SamplingParams(), 0)
    threads = ops.num_threads()
    with pytest.raises(KeyboardInterrupt), ahead.beside(Slow(), [seq], Draft.chains([[3]]), [1]):
        assert running.wait(10)
        raise KeyboardInterrupt
    assert not running.is_set()
    assert ops.num_threads() == threads
    with ahead.beside(Slow(), [seq], Draft.empty(1), [0]):
        assert not running.is_set(), "nothing was drafted: there is nothing to go on from"


@pytest.mark.parametrize(
    "spec",
    [
        SpecConfig("ngram", overlap=1),
        SpecConfig("none", overlap=1),
        SpecConfig("cascade", "embedded-draft", below=(SpecConfig("draft_model", overlap=1),)),
        SpecConfig("draft_model", "embedded-draft", overlap=1, options={"siblings": 2}),
    ],
    ids=lambda s: s.method,
)
def test_who_cannot_go_ahead(spec):
    with pytest.raises(ConfigError, match="siblings" if spec.options else f"{spec.method!r}.*draft_model can"):
        Level.of(spec).check()
    assert not resolve(spec).can_overlap and resolve(SpecConfig("draft_model", "embedded-draft")).can_overlap


def test_cores_for_both(pair_folders, monkeypatch):
    target, draft = map(str, pair_folders)
    monkeypatch.setattr(ops, "available_cores", lambda: 4)
    with pytest.raises(ConfigError, match=r"--overlap 4 would leave the target none of 4 core\(s\)"):
        LLM(target, draft, overlap=4)
    with pytest.raises(ConfigError, match="leave it out on a GPU"):
        check_parts(pair_folders[0], make_config(draft, overlap=1, device="cuda"))
    ahead = LLM(target, draft, overlap=3).engine.ahead
    assert (ahead.threads, ahead.others) == (3, 1)
