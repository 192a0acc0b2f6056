"""The n-gram drafter against a search of the whole text."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from sameseed.drafters.ngram import NgramDrafter
from sameseed.errors import ConfigError
from sameseed.request import SamplingParams, Sequence


def sequence(tokens: list[int], name: int = 0) -> Sequence:
    return Sequence(name, tokens, SamplingParams(), 0)


def by_hand(tokens: list[int], low: int, high: int, count: int) -> list[int]:
    """Longest suffix first; its latest earlier occurrence; what followed, read on through what it copies."""
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@given(
    start=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    grown=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 8),
)
@example(start=[1, 1], grown=[], low=1, more=0, count=3)
def test_equals_a_search(start: list[int], grown: list[list[int]], low: int, more: int, count: int) -> None:
    drafter = NgramDrafter(NgramDrafter.Options(max_ngram=low + more, min_ngram=low))
    seq = sequence(start)
    for new in [[], *grown]:
        seq.token_ids += new
        draft = drafter.propose([seq], [count])
        assert draft.tokens.tolist() == by_hand(seq.token_ids, low, low + more, count)
        assert draft.parents.tolist() == list(range(-1, len(draft.tokens) - 1))


def test_by_example() -> None:
    drafter = NgramDrafter()
    assert drafter.propose([sequence([1, 2, 3, 4, 9, 1, 2, 3])], [3]).tokens.tolist() == [4, 9, 1]
    assert drafter.propose([sequence([1, 2, 8, 1, 2, 9, 1, 2], 1)], [1]).tokens.tolist() == [9], "the latest wins"
    assert drafter.propose([sequence([3, 1, 2, 8, 4, 1, 2, 9, 3, 1, 2], 2)], [1]).tokens.tolist() == [8], (
        "the longest wins"
    )
    assert drafter.propose([sequence([1, 2, 1, 2, 1, 2], 3)], [5]).tokens.tolist() == [1, 2, 1, 2, 1]
    assert drafter.propose([sequence([1, 2, 3], 4), sequence([7] * 3, 5)], [0, 2]).offsets.tolist() == [0, 0, 2]


def test_sequences_do_not_mix() -> None:
    rng = random.Random(0)
    drafter = NgramDrafter(NgramDrafter.Options(min_ngram=1))
    seqs = [sequence([rng.randrange(4) for _ in range(5)], i) for i in range(3)]
    for _ in range(20):
        draft = drafter.propose(seqs, [3, 3, 3])
        for b, seq in enumerate(seqs):
            assert draft.nodes(b)[0] == by_hand(seq.token_ids, 1, 4, 3)
            seq.token_ids.append(rng.randrange(4))
    drafter.release(seqs[1])
    assert drafter.propose([seqs[1]], [3]).tokens.tolist() == by_hand(seqs[1].token_ids, 1, 4, 3)


@pytest.mark.parametrize("sizes", [(0, 2), (3, 2), (1, 33)])
def test_bad_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="1 <= min_ngram <= max_ngram <= 32"):
        NgramDrafter.Options(min_ngram=sizes[0], max_ngram=sizes[1])
