"""The demo tells what came out, whatever it was."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from sameseed.demo import affordable, conclude


@pytest.mark.parametrize(
    ("speedups", "same", "code", "words"),
    [
        ((1.2, 1.7), True, 0, ("b: 1.70 times",)),
        ((0.8, 0.7), True, 0, ("Nothing beat plain decoding", "a at 0.80")),
        ((1.5, 1.7), False, 1, ("differed", "b")),
    ],
)
def test_what_came_out(speedups: tuple[float, float], same: bool, code: int, words: tuple[str, ...]) -> None:
    stream = io.StringIO()
    records: list[dict[str, Any]] = [
        {"config": {"draft": draft, "label": label}, "speedup": speedup, "equals_plain": equal}
        for draft, label, speedup, equal in (
            ("none", "plain", 1.0, True),
            ("ngram", "a", speedups[0], True),
            ("ngram", "b", speedups[1], same),
        )
    ]
    assert conclude(records, Console(file=stream, width=200)) == code
    assert all(word in stream.getvalue() for word in words)


def test_a_slow_machine_gives_up_rounds_before_tokens() -> None:
    assert affordable(1e6, 24) == (16, 64, 3)
    assert affordable(3 * 3 * 64, 24) == (3, 64, 3)
    assert affordable(3 * 3 * 32, 24) == (3, 32, 3)
    assert affordable(3 * 3 * 32 - 1, 24) == (4, 64, 1)
    assert affordable(60, 24) == (3, 20, 1)
    assert affordable(0, 24) == (3, 8, 1)
    assert affordable(1e6, 2) == (2, 64, 3)
