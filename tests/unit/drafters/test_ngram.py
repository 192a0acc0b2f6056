"""The n-gram drafter against a search of the whole text."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import example, given

from sameseed.drafters.ngram import NgramDrafter
from sameseed.request import SamplingParams, Sequence


def by_hand(tokens: list[int], low: int, high: int, count: int) -> list[int]:
    """The continuation of the latest earlier occurrence of the longest suffix; it may read on into its own copy."""
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
@example(start=[1, 2, 8, 1, 2, 9, 1, 2], grown=[], low=2, more=2, count=1)  # the latest occurrence wins
@example(start=[3, 1, 2, 8, 4, 1, 2, 9, 3, 1, 2], grown=[], low=2, more=2, count=1)  # the longest suffix wins
def test_equals_a_search(start: list[int], grown: list[list[int]], low: int, more: int, count: int) -> None:
    drafter = NgramDrafter(NgramDrafter.Options(max_ngram=low + more, min_ngram=low))
    seq = Sequence(0, start, SamplingParams(), 0)
    for new in [[], *grown]:
        seq.token_ids += new
        draft = drafter.propose([seq], [count])
        assert draft.tokens.tolist() == by_hand(seq.token_ids, low, low + more, count)
        assert draft.parents.tolist() == list(range(-1, len(draft.tokens) - 1))
