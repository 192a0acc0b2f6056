"""The textbook as oracle: it agrees with the engine in every format, and notices what plain texts do wrong too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sameseed.laws import oracle, textbook
from sameseed.laws.check import PASSED, Effort, run_check
from sameseed.laws.mutants import MUTANTS, toy_subject
from sameseed.request import SamplingParams
from sameseed.spec.sampling import gumbel_noise
from sameseed.tokenizer import Tokenizer

# Mistakes of what plain and speculative decoding share: texts with a draft are those without.
SHARED = ("noise ignores the position", "the temperature is applied twice", "one token more than asked for")


@pytest.mark.parametrize(("weights", "kv"), [("auto", "fp32"), ("auto", "bf16"), ("w8a8", "int8"), ("fp8-a8", "auto")])
def test_texts_are_the_textbooks(pair_folders: tuple[Path, Path], weights: str, kv: str) -> None:
    result = run_check(oracle.texts, toy_subject(Tokenizer.from_folder(pair_folders[0]), weights, kv), Effort(1e-9))
    assert result.status == PASSED, result.found.findings
    assert result.found.sizes["tokens"] > 300
    assert result.found.statistic["near_ties"] <= (0 if kv == "fp32" else 50), "counted, and few"


@pytest.mark.parametrize("name", SHARED)
def test_a_mistake_that_all_texts_share_is_noticed(pair_folders: tuple[Path, Path], name: str) -> None:
    subject = toy_subject(Tokenizer.from_folder(pair_folders[0]), kv="fp32")
    with next(m for m in MUTANTS if m.name == name).alive():
        found = run_check(oracle.texts, subject, Effort(1e-9)).found
    assert found.findings and not found.unfinished


def test_the_noise_is_the_samplers() -> None:
    for seed, position in ((0, 0), (7, 100), (2**63 - 1, 3)):
        assert np.array_equal(textbook.gumbel(seed, position, 50), gumbel_noise(seed, position, np.arange(50)))


def test_a_near_tie_is_told_from_a_mistake() -> None:
    row, greedy = np.array([1.0, 0.9999, 0.5]), SamplingParams()
    assert textbook.judge(row, greedy, 0, (), (), 0, near=1e-3) == (True, True)
    assert textbook.judge(row, greedy, 0, (), (), 1, near=1e-3) == (False, True)
    assert textbook.judge(row, greedy, 0, (), (), 2, near=1e-3) == (False, False)
    few = SamplingParams(temperature=1.0, top_k=1)
    assert textbook.judge(row, few, 0, (), (), 2, near=1e-3) == (False, False)
    assert textbook.ends(SamplingParams(max_tokens=9, stop=("b",)), (1,), (5, 6, 7), ["a", "ab", "abc"], (), 99) == 2
