"""Check V1: the server's code passes, and every known-wrong version of it fails."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from proof import mutants, requests as proof
from proof.mistakes_server import SERVER_MISTAKES

from sameseed.laws.check import PASSED, Effort, run_check
from sameseed.laws.subject import Subject
from sameseed.request import Completion
from sameseed.server import service
from sameseed.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def baseline(pair_folders: tuple[Path, Path]) -> mutants.Baseline:
    return mutants.Baseline(Tokenizer.from_folder(pair_folders[0]))


def test_the_right_server_passes(baseline: mutants.Baseline) -> None:
    result = baseline.result("V1", {})
    assert result.status == PASSED, (result.found.findings, result.found.lacking)


@pytest.mark.parametrize("seed", range(3))
def test_the_right_server_passes_whatever_is_drawn(baseline: mutants.Baseline, seed: int) -> None:
    """Fields drawn together may need more room than a toy's cache has, or a prompt cut to leave room for the answer."""
    result = run_check(proof.requests, _subject(baseline, seed), Effort(0.04))
    assert result.status == PASSED, (result.found.findings, result.found.lacking)
    assert result.found.sizes["requests"] > 80 + 30, "80 drawn, after each field alone"


@pytest.mark.parametrize("seed", [4, 6])
def test_a_request_that_reaches_the_engine_was_taken(baseline: mutants.Baseline, seed: int) -> None:
    """An engine without room for an answer ends it with 400, like a refusal by the server: so with seed 4."""
    (wrong,) = (m for m in SERVER_MISTAKES if m.function is service.check_length)
    with wrong.alive():
        found = run_check(proof.requests, _subject(baseline, seed), mutants.EFFORT).found
    assert found.statistic["taken_though_bad"] >= 2, found.findings


def _subject(baseline: mutants.Baseline, seed: int) -> Subject:
    return replace(mutants.toy_subject(baseline.tokenizer), seed=seed)


@pytest.fixture(scope="module")
def written() -> dict[str, list[list[Completion]]]:
    """What plain decoding wrote, by the cases."""
    return {}


@pytest.fixture
def plain_once(monkeypatch: pytest.MonkeyPatch, written: dict[str, list[list[Completion]]]) -> None:
    """Cases are written plainly once, not for every mutant: there is no code of the server in it."""
    plain = proof._plain

    def known(subject: Subject, cases: Sequence[proof.Case]) -> list[list[Completion]]:
        key = repr((subject.seed, cases))
        if key not in written:
            written[key] = plain(subject, cases)
        return written[key]

    monkeypatch.setattr(proof, "_plain", known)


@pytest.mark.usefixtures("plain_once")
@pytest.mark.parametrize("mutant", SERVER_MISTAKES, ids=lambda m: m.name)
def test_every_mutant_is_rejected(baseline: mutants.Baseline, mutant: mutants.Mutant) -> None:
    assert mutant.function.__module__.startswith("sameseed.server.")
    trial = mutants.try_mutant(mutant, baseline)
    assert trial.caught_by == "V1", trial.said


def test_no_drawn_request_rules_all_tokens_out(baseline: mutants.Baseline) -> None:
    """The server rightly refuses such a request, so the check would call a right server wrong."""
    subject = mutants.toy_subject(baseline.tokenizer)
    eos, every = set(subject.target.config.eos_token_ids), set(range(subject.vocab_size))
    for seed in range(40):
        for case in proof.made_cases(subject, random.Random(seed), 40):
            p = case.params
            ends = {*eos, *p.stop_token_ids} if p.min_tokens else set()
            allowed = every if p.allowed_token_ids is None else {*p.allowed_token_ids}
            assert allowed - {*p.banned_token_ids} - ends, (seed, case.body)
