"""Check V1: the server's code passes, and every known-wrong version of it fails."""

import random
from dataclasses import replace

import pytest
from proof import mutants, requests as proof
from proof.mistakes_server import SERVER_MISTAKES

from sameseed.laws.check import PASSED, Effort, run_check
from sameseed.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def baseline(pair_folders):
    return mutants.Baseline(Tokenizer.from_folder(pair_folders[0]))


def test_the_right_server_passes(baseline):
    result = baseline.result("V1", {})
    assert result.status == PASSED, (result.found.findings, result.found.lacking)


@pytest.mark.parametrize("seed", range(3))
def test_the_right_server_passes_whatever_is_drawn(baseline, seed):
    """Fields drawn together may need more room than a toy's cache has, or a prompt cut to leave room for the answer."""
    result = run_check(proof.requests, _subject(baseline, seed), Effort(0.04))
    assert result.status == PASSED, (result.found.findings, result.found.lacking)
    assert result.found.sizes["requests"] > 80 + 30, "80 drawn, after each field alone"


def _subject(baseline, seed):
    return replace(mutants.toy_subject(baseline.tokenizer), seed=seed)


@pytest.fixture(scope="module")
def written():
    """What plain decoding wrote, by the cases."""
    return {}


@pytest.fixture
def plain_once(monkeypatch, written):
    """Cases are written plainly once, not for every mutant: there is no code of the server in it."""
    plain = proof._plain

    def known(subject, cases):
        key = repr((subject.seed, cases))
        if key not in written:
            written[key] = plain(subject, cases)
        return written[key]

    monkeypatch.setattr(proof, "_plain", known)


@pytest.mark.usefixtures("plain_once")
@pytest.mark.parametrize("mutant", SERVER_MISTAKES, ids=lambda m: m.name)
def test_every_mutant_is_rejected(baseline, mutant):
    assert mutant.function.__module__.startswith("sameseed.server.")
    trial = mutants.try_mutant(mutant, baseline)
    assert trial.caught_by == "V1", trial.said


def test_no_drawn_request_rules_all_tokens_out(baseline):
    """The server rightly refuses such a request, so the check would call a right server wrong."""
    subject = mutants.toy_subject(baseline.tokenizer)
    eos, every = set(subject.target.config.eos_token_ids), set(range(subject.vocab_size))
    for seed in range(40):
        for case in proof.made_cases(subject, random.Random(seed), 40):
            p = case.params
            ends = {*eos, *p.stop_token_ids} if p.min_tokens else set()
            allowed = every if p.allowed_token_ids is None else {*p.allowed_token_ids}
            assert allowed - {*p.banned_token_ids} - ends, (seed, case.body)
