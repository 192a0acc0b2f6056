"""Shadow: to follow the target is to truncate to the common prefix."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from sameseed.drafters._shadow import Guide, Shadow
from sameseed.kvcache.blocks import BlockManager
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.sampling import SamplingState


def nobody(seq: Sequence, length: int) -> None:
    """A `rewind` that does nothing."""


def runner() -> Any:
    """The part of a ModelRunner that a Shadow needs."""
    mock = SimpleNamespace(blocks=BlockManager(64, 4), model=SimpleNamespace(max_model_len=256))
    mock.truncate = lambda seq, length: ModelRunner.truncate(mock, seq, length)
    return mock


def test_follow_keeps_what_was_guessed_right() -> None:
    target = Sequence(7, [1, 2, 3], SamplingParams(), 5)
    shadow = Shadow(target, runner())
    assert (shadow.seq.seed, shadow.seq.num_prompt) == (5, 3)
    shadow.follow(target, nobody)
    assert shadow.seq.num_cached == 0
    shadow.seq.token_ids += [4, 5, 6]  # drafted; the last token was not run
    shadow.seq.num_cached = 5
    target.token_ids += [4, 9]  # one right token, one wrong
    shadow.follow(target, nobody)
    assert shadow.seq.token_ids == [1, 2, 3, 4, 9]
    assert shadow.seq.num_cached == 4, "rows of 1 2 3 4 stand; 9 is pending"


def test_penalty_counts_of_dropped_tokens_are_forgotten() -> None:
    target = Sequence(0, [1, 2], SamplingParams(frequency_penalty=1.0), 0)
    shadow = Shadow(target, runner())
    shadow.follow(target, nobody)
    shadow.seq.token_ids += [3, 3]
    assert SamplingState.of(shadow.seq, 10).counts[3] == 2
    target.token_ids += [3, 4, 5, 6]
    shadow.follow(target, nobody)
    assert SamplingState.of(shadow.seq, 10).counts.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]


def test_random_walk() -> None:
    """After following, whatever was drafted, the tokens are the target's and the cached rows are a true prefix."""
    rng = random.Random(0)
    target = Sequence(0, [1, 2, 3], SamplingParams(), 0)
    shadow = Shadow(target, runner())
    rows: list[int] = []  # the tokens in the shadow's cache, by position
    for _ in range(300):
        shadow.follow(target, nobody)
        seq = shadow.seq
        assert seq.token_ids == target.token_ids
        assert seq.num_pending >= 1
        del rows[seq.num_cached :]
        assert rows == seq.token_ids[: seq.num_cached]
        guesses = [rng.randrange(3) for _ in range(rng.randint(0, 4))]
        for guess in guesses:  # run what is pending, then append the guess
            rows += seq.token_ids[seq.num_cached :]
            seq.num_cached = len(seq)
            seq.token_ids.append(guess)
        target.token_ids += [*guesses[: rng.randint(0, len(guesses))], rng.randrange(3)]


def test_a_guide_gives_what_its_grammar_allows_until_that_fails() -> None:
    """Then it allows nothing, and the grammar is not asked again: the text goes on without drafts."""
    asked: list[int] = []

    def allowed(output: Any, path: Any) -> Any:
        asked.append(1)
        return [1 / (3 - len(asked))]  # fails when it is asked for the third time

    guide = Guide(SimpleNamespace(allowed=allowed))  # type: ignore[arg-type]
    assert [list(guide.allowed((), ())) for _ in range(5)] == [[0.5], [1.0], [], [], []]
    assert guide.failed and len(asked) == 3
