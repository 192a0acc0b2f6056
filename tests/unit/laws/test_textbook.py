"""The textbook as oracle: it agrees with the engine in every format, and notices mistakes of plain decoding too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from proof.mutants import MUTANTS, toy_subject

from sameseed.errors import RequestError
from sameseed.grammar import Vocabulary
from sameseed.grammar.matching import Matching
from sameseed.laws import oracle, textbook, trees
from sameseed.laws.check import PASSED, Effort, run_check
from sameseed.request import SamplingParams
from sameseed.spec.sampling import gumbel_noise
from sameseed.tokenizer import Tokenizer

# Mistakes that plain and speculative decoding share, so that their texts agree.
SHARED = ("noise ignores the position", "the temperature is applied twice", "one token more than asked for")


@pytest.mark.parametrize(
    ("weights", "kv"), [("auto", "fp32"), ("auto", "bf16"), ("w8a8", "int8"), ("fp8-a8", "auto"), ("bf16-a16", "auto")]
)
def test_texts_are_the_textbooks(pair_folders: tuple[Path, Path], weights: str, kv: str) -> None:
    result = run_check(oracle.texts, toy_subject(Tokenizer.from_folder(pair_folders[0]), weights, kv), Effort(1e-9))
    assert result.status == PASSED, result.found.findings
    assert result.found.sizes["tokens"] > 300 and result.found.sizes["largest_tree"] > 40
    assert result.found.statistic["near_ties"] <= (0 if kv == "fp32" else 50), "counted, and few"


def test_texts_are_read_in_portions(pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    subject = toy_subject(Tokenizer.from_folder(pair_folders[0]))
    whole = run_check(oracle.texts, subject, Effort(1e-9)).found
    monkeypatch.setattr(oracle, "PORTION", 1)  # one text at a time
    parts = run_check(oracle.texts, subject, Effort(1e-9)).found
    assert whole is not None and parts is not None
    same = [{**found.sizes, **found.statistic, "exact": 0, "near_ties": 0} for found in (whole, parts)]
    assert same[0] == same[1]  # sums of other sizes may judge near ties differently


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
    early = SamplingParams(max_tokens=9, stop=("b",), min_tokens=3)
    assert textbook.ends(early, (1,), (5, 6, 7, 8), ["a", "ab", "abc", "abcb"], (), 99) == 4, "an older one may stand"


def test_where_a_text_is_cut() -> None:
    params = SamplingParams(stop=("cd", "d"))
    assert textbook.stopped(params, ["ab", "abcd"]) == 2, "the first of several"
    assert textbook.stopped(params, ["abc", "abcd"]) == 2, "also one that began in the token before"
    assert textbook.stopped(params, ["abcd", "abcde"]) is None, "an older one was allowed to stand"
    assert textbook.stopped(params, ["abc", "abcd\ufffd"]) == 2, "whole before half a character"
    assert textbook.stopped(params, ["abcd\ufffd", "abcdé"]) is None, "an older one"


@pytest.mark.parametrize("name", ["grammar", oracle.EXPRESSION])
def test_the_textbook_reads_a_grammar_as_the_engine_does(pair_folders: tuple[Path, Path], name: str) -> None:
    subject = toy_subject(Tokenizer.from_folder(pair_folders[0]))
    rule, eos = oracle.ruled(subject)[name], subject.target.config.eos_token_ids
    grammar, asked = rule.make(), [(), (next(iter(rule.pieces)),), tuple(rule.pieces)]
    for choice in rule.choices[:100]:
        path = [next(t for t, piece in rule.pieces.items() if piece == letter) for letter in choice]
        asked += [tuple(path[:n]) for n in range(len(path) + 1)]
    assert len(asked) > 100
    for output in asked:
        engine = np.flatnonzero(grammar.allowed(output, ()))
        assert textbook.allowed(rule.choices, rule.pieces, eos, output) == engine.tolist(), output


@pytest.mark.parametrize("name", ["grammar", oracle.EXPRESSION])
def test_a_draft_that_guesses_outside_the_grammar_changes_no_text(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A text that breaks the grammar is noticed: in this test the textbook's grammar allows only one text."""
    subject = toy_subject(Tokenizer.from_folder(pair_folders[0]))
    rules = oracle.ruled(subject)
    other = rules[name]._replace(choices=rules[name].choices[:1])
    monkeypatch.setattr(oracle, "ruled", lambda subject: {**rules, name: other})
    found = run_check(oracle.texts, subject, Effort(1e-9)).found
    assert found.findings and name in found.findings[0].where


def test_an_expression_is_left_out_aloud(pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(vocabulary: Vocabulary) -> Matching:
        raise RequestError("structured output needs xgrammar")

    monkeypatch.setattr(oracle, "Matching", none)
    result = run_check(oracle.texts, toy_subject(Tokenizer.from_folder(pair_folders[0])), Effort(1e-9))
    assert result.status == PASSED
    assert "no regular expression was tried" in result.found.notes[-1]


def test_trees_may_be_as_large_as_they_are_asked_for() -> None:
    drafter = trees.TreeDrafter(lambda seq: (), 50)
    assert drafter.branches, "else the engine cuts them to the depth of the text that is left"
