"""The demo tells what came out, whatever it was."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from sameseed.demo import affordable, conclude


def made(label: str, speedup: float, same: bool = True) -> dict[str, Any]:
    draft = "none" if label == "plain" else "ngram"
    return {"config": {"draft": draft, "label": label}, "speedup": speedup, "equals_plain": same}


def said(*records: dict[str, Any]) -> tuple[int, str]:
    stream = io.StringIO()
    code = conclude(records, Console(file=stream, width=200))
    return code, stream.getvalue()


def test_a_gain() -> None:
    code, text = said(made("plain", 1.0), made("a", 1.2), made("b", 1.7))
    assert code == 0
    assert "b: 1.70 times" in text


def test_no_gain_is_said_too() -> None:
    code, text = said(made("plain", 1.0), made("a", 0.8), made("b", 0.7))
    assert code == 0
    assert "Nothing beat plain decoding" in text and "a at 0.80" in text


def test_a_text_that_differs_fails() -> None:
    code, text = said(made("plain", 1.0), made("a", 1.5), made("b", 1.7, same=False))
    assert code == 1
    assert "differed" in text and "b" in text


def test_a_slow_machine_gives_up_rounds_before_tokens() -> None:
    assert affordable(1e6, 24) == (16, 64, 3)
    assert affordable(3 * 3 * 64, 24) == (3, 64, 3)
    assert affordable(3 * 3 * 32, 24) == (3, 32, 3)
    assert affordable(3 * 3 * 32 - 1, 24) == (4, 64, 1)
    assert affordable(60, 24) == (3, 20, 1)
    assert affordable(0, 24) == (3, 8, 1)
    assert affordable(1e6, 2) == (2, 64, 3)
