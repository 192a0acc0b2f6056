"""The textbook as oracle: it agrees with the engine in every format, and notices mistakes of plain decoding too."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from proof.mutants import toy_subject

from sameseed.errors import RequestError
from sameseed.laws import oracle, textbook
from sameseed.laws.check import PASSED, Effort, run_check
from sameseed.laws.statistics import ALPHA, chi_square_tail, g_test, target_law
from sameseed.request import SamplingParams
from sameseed.spec.sampling import gumbel_noise
from sameseed.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("weights", "kv"),
    [
        ("auto", "fp32"), ("auto", "bf16"), ("w8a8", "int8"), ("w8a8-outliers", "int8_a8"), ("w4a8", "bf16"),
        ("nf4", "fp8_e4m3"), ("fp8-a8", "auto"), ("bf16-a16", "auto"),
    ],
)  # fmt: skip
def test_texts_are_the_textbooks(pair_folders, weights, kv):
    result = run_check(oracle.texts, toy_subject(Tokenizer.from_folder(pair_folders[0]), weights, kv), Effort(1e-9))
    assert result.status == PASSED, result.found.findings
    assert result.found.sizes["tokens"] > 300 and result.found.sizes["largest_tree"] > 40
    assert result.found.statistic["near_ties"] <= (0 if kv == "fp32" else 50), "counted, and few"


def test_texts_are_read_in_portions(pair_folders, monkeypatch):
    subject = toy_subject(Tokenizer.from_folder(pair_folders[0]))
    subject.target.config = replace(subject.target.config, suppress_tokens=tuple(range(9, 40)))
    whole = run_check(oracle.texts, subject, Effort(1e-9)).found
    monkeypatch.setattr(oracle, "PORTION", 1)  # one text at a time
    parts = run_check(oracle.texts, subject, Effort(1e-9)).found
    assert whole is not None and parts is not None
    same = [{**found.sizes, **found.statistic, "exact": 0, "near_ties": 0} for found in (whole, parts)]
    assert same[0] == same[1] and not same[0]["differing_tokens"]  # sums of other sizes may judge near ties differently


def test_the_noise_is_the_samplers():
    for seed, position in ((0, 0), (7, 100), (2**63 - 1, 3)):
        assert np.array_equal(textbook.gumbel(seed, position, 50), gumbel_noise(seed, position, np.arange(50)))


def test_a_near_tie_is_told_from_a_mistake():
    row, greedy = np.array([1.0, 0.9999, 0.5]), SamplingParams()
    assert textbook.judge(row, greedy, 0, (), (), 0, near=1e-3) == (True, True)
    assert textbook.judge(row, greedy, 0, (), (), 1, near=1e-3) == (False, True)
    assert textbook.judge(row, greedy, 0, (), (), 2, near=1e-3) == (False, False)
    few = SamplingParams(temperature=1.0, top_k=1)
    assert textbook.judge(row, few, 0, (), (), 2, near=1e-3) == (False, False)


@pytest.mark.parametrize("name", ["grammar", oracle.EXPRESSION])
def test_a_draft_that_guesses_outside_the_grammar_changes_no_text(pair_folders, monkeypatch, name):
    """A text that breaks the grammar is noticed: in this test the textbook's grammar allows only one text."""
    subject = toy_subject(Tokenizer.from_folder(pair_folders[0]))
    rules = oracle.ruled(subject)
    other = rules[name]._replace(choices=rules[name].choices[:1])
    monkeypatch.setattr(oracle, "ruled", lambda subject: {**rules, name: other})
    found = run_check(oracle.texts, subject, Effort(1e-9)).found
    assert found.findings and name in found.findings[0].where


def test_an_expression_is_left_out_aloud(pair_folders, monkeypatch):
    def none(vocabulary):
        raise RequestError("structured output needs xgrammar")

    monkeypatch.setattr(oracle, "Matching", none)
    result = run_check(oracle.texts, toy_subject(Tokenizer.from_folder(pair_folders[0])), Effort(1e-9))
    assert result.status == PASSED
    assert "no regular expression was tried" in result.found.notes[-1]


LAW = {(i,): p for i, p in enumerate((0.4, 0.3, 0.2, 0.0999, 0.0001))}


def draws(law, count, seed=0):
    cells = list(law)
    p = np.array(list(law.values()))
    picked = np.random.default_rng(seed).choice(len(cells), size=count, p=p / p.sum())
    return Counter(cells[i] for i in picked)


def test_draws_from_the_law_fit():
    values = [target_law(draws(LAW, 4000, seed), LAW) for seed in range(200)]
    assert all(v.good for v in values)
    p = sorted(v.p_value for v in values)
    assert 0.4 < p[100] < 0.6, "p-values are uniform"
    assert p[10] < 0.15


def test_draws_from_a_law_nearby_do_not():
    other = {**LAW, (0,): 0.43, (1,): 0.27}
    assert not target_law(draws(other, 20_000), LAW).good
    spread = {(i,): 1 / 4096 for i in range(4096)}
    skewed = {c: p * (1.4 if c[0] % 2 else 0.6) for c, p in spread.items()}
    assert target_law(draws(spread, 40_000), spread).good
    assert not target_law(draws(skewed, 40_000), spread).good


def test_what_the_law_rules_out_never_passes():
    counts = draws(LAW, 4000)
    counts[(9,)] += 1
    assert target_law(counts, LAW).impossible == 1
    assert not target_law(counts, LAW).good
    assert target_law(Counter({(0,): 10}), {(0,): 1.0, (1,): 0.0}).good
    assert not target_law(Counter({(0,): 10, (1,): 1}), {(0,): 1.0, (1,): 0.0}).good


def test_tails():
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, abs=1e-6)
    assert chi_square_tail(18.307038, 10) == pytest.approx(0.05, abs=1e-6)
    assert g_test(np.array([50.0, 50.0]), np.array([0.5, 0.5])) == pytest.approx(1.0)
    assert g_test(np.array([900.0, 100.0]), np.array([0.5, 0.5])) < ALPHA
