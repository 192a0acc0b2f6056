"""Drafting ahead: the same drafts and texts, at other times; a failure costs only the guess."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lawkit import SAMPLED, Pair, make_engine, random_prompts, run, texts

from sameseed import LLM, SpecConfig, ops
from sameseed.drafters.draft_model import DraftModelDrafter
from sameseed.engine.engine import Engine
from sameseed.engine.levels import Level, resolve
from sameseed.engine.overlap import Overlap
from sameseed.errors import ConfigError
from sameseed.request import SamplingParams, Sequence, SpecMetrics
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

    def __init__(self, most: int, seed: int = 0) -> None:
        super().__init__(1)
        self.most = most
        self.random = random.Random(seed)

    @contextmanager
    def beside(self, drafter: Drafter, seqs: Seq[Sequence], draft: Draft, num_draft: Seq[int]) -> Iterator[Any]:
        self._guesses = ()
        if len(draft.tokens):
            left = iter(range(self.random.randint(0, self.most)))
            self._guesses = drafter.ahead(seqs, draft, num_draft, lambda: next(left, None) is not None)
        yield lambda: None


class Tireless(Overlap):
    """Drafts ahead until the target's pass ends, however long the drafter's passes take."""

    def fits(self, seconds: float) -> bool:
        return True


def patient(engine: Engine) -> Engine:
    """Makes the engine's target slow: each of its passes waits until drafting ahead has ended."""
    ahead = engine.ahead = Tireless(1)
    forward = engine.runner.forward

    def slow(*args: Any, **more: Any) -> Any:
        ahead._worker.submit(lambda: None).result()  # there is one worker: earlier work has ended
        return forward(*args, **more)

    engine.runner.forward = slow  # type: ignore[method-assign]
    return engine


def drafted(metrics: SpecMetrics) -> tuple[Any, ...]:
    return metrics.num_rounds, metrics.num_draft_tokens, metrics.num_accepted_tokens_per_pos, metrics.num_rollbacks


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    "setting",
    [{"k": 1}, {"k": 4}, {"k": 6, "confidence": 0.3}, {"k": 4, "block": 4, "rows": 20, "tokens": 256}],
    ids=str,
)
def test_the_same_drafts_at_other_times(pair: Pair, asked: str, setting: dict[str, Any]) -> None:
    """Not only texts: proposed and accepted tokens are the same, however far drafting ahead got."""
    waiting = make_engine(pair, "draft_model", **setting)
    engine = make_engine(pair, "draft_model", **setting)
    engine.ahead = Inline(2 * setting["k"])
    assert texts(run(engine, PROMPTS, ASKED[asked])) == texts(run(waiting, PROMPTS, ASKED[asked]))
    if "tokens" not in setting:  # if blocks run short, those taken ahead may cost a draft
        assert drafted(engine.metrics) == drafted(waiting.metrics)
    assert 0 < engine.metrics.num_ahead_kept < engine.metrics.num_ahead, "some suppositions held, some did not"
    assert waiting.metrics.num_ahead == 0
    assert engine.drafter._ready == {}  # type: ignore[attr-defined]


def test_what_is_ready_is_not_drafted_again(pair: Pair) -> None:
    """With a draft that is always right, all draft passes after the first round run beside the target."""
    engine = patient(make_engine(Pair(pair.target, pair.target, pair.tokenizer), "draft_model", k=5))
    assert isinstance(engine.drafter, DraftModelDrafter)
    runner, here = engine.drafter.runner, threading.get_ident()
    forward, passes = runner.forward, {True: 0, False: 0}
    runner.grow = lambda *_: None  # type: ignore[method-assign]  # a pass a token, to be counted

    def counted(*args: Any, **more: Any) -> Any:
        passes[threading.get_ident() == here] += 1
        return forward(*args, **more)

    runner.forward = counted  # type: ignore[method-assign]
    done = run(engine, PROMPTS[:1], SamplingParams(max_tokens=61, seed=1, ignore_eos=True))
    spec = done[0].metrics.spec
    assert (spec.num_drafts, spec.acceptance_rate) == (10, 1.0)
    assert spec.num_ahead == spec.num_ahead_kept == spec.num_drafts
    assert passes[True] == 5
    assert passes[False] >= 9 * 6
    assert done[0].metrics.as_dict()["num_ahead_kept"] == 10


def test_a_failure_costs_a_guess(pair: Pair, caplog: Any) -> None:
    """A pass ahead that fails, wherever it does, changes no text, leaves nothing behind and is logged once."""
    engine = patient(make_engine(pair, "draft_model", k=4))
    assert isinstance(engine.drafter, DraftModelDrafter)
    runner, here, rng = engine.drafter.runner, threading.get_ident(), random.Random(1)
    forward, broken = runner.forward, []

    def fragile(*args: Any, **more: Any) -> Any:
        if threading.get_ident() != here and rng.random() < 0.2:
            broken.append(1)
            raise MemoryError("no room")
        return forward(*args, **more)

    runner.forward = fragile  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        done = run(engine, PROMPTS, ASKED["sampled"])
    assert texts(done) == texts(run(make_engine(pair), PROMPTS, ASKED["sampled"]))
    assert len(broken) > 3
    assert len(caplog.records) == 1
    assert "no room" in caplog.text
    waiting = make_engine(pair, "draft_model", k=4)
    run(waiting, PROMPTS, ASKED["sampled"])
    assert drafted(engine.metrics) == drafted(waiting.metrics)


def test_a_target_that_fails_waits_for_the_drafter(pair: Pair) -> None:
    """After an interrupted target pass, nothing runs beside it any more, and the thread's limit is restored."""
    engine = make_engine(pair, "draft_model", k=4)
    engine.ahead = ahead = Overlap(1)
    running = threading.Event()

    class Slow(Drafter):
        def ahead(self, seqs: Any, draft: Any, num_draft: Any, going: Callable[[], bool]) -> list[list[int]]:
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


def test_a_shorter_wish_takes_a_part(pair: Pair) -> None:
    """The next draft may be shorter or longer than the tokens that are ready, or not wanted at all."""
    for wish in (0, 1, 3, 6):
        drafters = [make_engine(pair, "draft_model", k=4).drafter for _ in range(2)]
        seqs = [Sequence(0, PROMPTS[3], SamplingParams(), 0) for _ in drafters]
        first, _ = (d.propose([s], [4]) for d, s in zip(drafters, seqs))
        guess = drafters[0].ahead([seqs[0]], first, [4], lambda: True)[0]
        assert len(guess) == 5
        # Asked again about an unchanged text, both drafters guess as before; then the first drafts ahead anew.
        assert drafters[0].propose([seqs[0]], [4]).tokens.tolist() == first.tokens.tolist()
        assert drafters[0].ahead([seqs[0]], first, [4], lambda: True)[0] == guess
        for seq in seqs:
            seq.token_ids += [*first.tokens.tolist(), guess[0]]
        second = [d.propose([s], [wish]) for d, s in zip(drafters, seqs)]
        assert second[0].tokens.tolist() == second[1].tokens.tolist()
        assert second[0].tokens.tolist()[:4] == guess[1 : 1 + wish]
        third = [d.propose([s], [4]) for d, s in zip(drafters, seqs)]
        assert third[0].tokens.tolist() == third[1].tokens.tolist()


@pytest.mark.parametrize(
    "spec",
    [
        SpecConfig("ngram", overlap=1),
        SpecConfig("none", overlap=1),
        SpecConfig("self_quant", overlap=1),
        SpecConfig("cascade", "embedded-draft", overlap=1, below=(SpecConfig("ngram"),)),
        SpecConfig("cascade", "embedded-draft", below=(SpecConfig("draft_model", overlap=1),)),
    ],
    ids=lambda s: s.method,
)
def test_who_cannot_go_ahead(spec: SpecConfig) -> None:
    with pytest.raises(ConfigError, match=rf"{spec.method!r} .* draft_model can, as the only level"):
        Level.of(spec).check()


def test_trees_do_not_go_ahead() -> None:
    spec = SpecConfig("draft_model", "embedded-draft", overlap=1, options={"siblings": 2})
    with pytest.raises(ConfigError, match="leave out overlap, or what makes trees of drafter 'draft_model': siblings"):
        Level.of(spec).check()
    assert not resolve(spec).can_overlap and resolve(SpecConfig("draft_model", "embedded-draft")).can_overlap


def test_cores_for_both(pair_folders: tuple[Path, Path], monkeypatch: Any) -> None:
    target, draft = map(str, pair_folders)
    monkeypatch.setattr(ops, "available_cores", lambda: 4)
    with pytest.raises(ConfigError, match=r"--overlap 4 would leave the target none of 4 core\(s\)"):
        LLM(target, draft, overlap=4)
    ahead = LLM(target, draft, overlap=3).engine.ahead
    assert isinstance(ahead, Overlap)
    assert (ahead.threads, ahead.others) == (3, 1)
    for wrong, said in ((-1, "overlap must be at least 0"), (True, "'overlap' must be of type int"), (1.5, "type int")):
        with pytest.raises(ConfigError, match=said):
            SpecConfig("draft_model", overlap=wrong)  # type: ignore[arg-type]
