"""Busy engines: what the checks of aborts, shared prefixes, scores and ties look at, and what they notice."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from proof.mutants import toy_subject

from sameseed.drafters._eagle_context import Contexts
from sameseed.kvcache.prefix import Prefixes
from sameseed.laws import busy, trial
from sameseed.laws.check import FAILED, NOT_SHOWN, PASSED, Effort, run_check
from sameseed.laws.logits import cache_rows
from sameseed.request import SamplingParams, Sequence
from sameseed.spec import verify
from sameseed.tokenizer import Tokenizer

QUICK = Effort(1e-9)


@pytest.fixture
def subject(pair_folders):
    return toy_subject(Tokenizer.from_folder(pair_folders[0]))


def looked(check, subject):
    return run_check(check, subject, QUICK)


def test_requests_are_aborted_at_every_stage(subject):
    result = looked(busy.coming_and_going, subject)
    assert result.status == PASSED, (result.found.findings, result.found.lacking)
    assert all(result.found.sizes[f"aborted_{stage}"] for stage in busy.STAGES)
    assert result.found.sizes["crowded_chunks"] > 1 and result.found.statistic["preemptions"] > 1
    assert not subject.leaks and subject.metrics.num_draft_tokens


def test_rows_of_another_tenant_are_told(subject, monkeypatch):
    assert looked(busy.beginnings, subject).status == PASSED
    own = Prefixes._digests

    def shared(self, seq, count):
        seq.tenant = ""
        return own(self, seq, count)

    monkeypatch.setattr(Prefixes, "_digests", shared)
    result = looked(busy.beginnings, subject)
    assert result.status == FAILED and "rows taken over" in result.found.findings[0].where


def test_without_a_prefix_cache_nothing_is_shown_of_it(subject, monkeypatch):
    monkeypatch.setattr(Prefixes, "find", lambda self, seq, first: [])
    result = looked(busy.beginnings, subject)
    assert result.status == NOT_SHOWN and "reused tokens: 0" in result.found.lacking[0]


def test_scores_of_another_row_are_told(subject, monkeypatch):
    assert looked(busy.scores, subject).status == PASSED
    right = verify.token_logprob
    monkeypatch.setattr(
        verify, "token_logprob", lambda row, *more: right(row + torch.arange(len(row)).numpy() / 9, *more)
    )
    result = looked(busy.scores, subject)
    assert result.status == FAILED and result.found.statistic["too_far"] > 10, "though all engines agree"


def test_the_cache_of_a_draft_is_looked_at(subject, monkeypatch):
    result = looked(cache_rows, subject)
    assert result.status == PASSED and result.found.sizes["draft_rows"] > 10
    shadows = trial.shadows

    def spoilt(drafter, seq):
        found = shadows(drafter, seq)
        for level, shadow in found:
            level.runner.cache.layers[0].k[shadow.blocks[0], 0] += 1
        return found

    monkeypatch.setattr(trial, "shadows", spoilt)
    result = looked(cache_rows, subject)
    assert result.status == FAILED and "the cache of DraftModelDrafter" in result.found.findings[0].where


def test_a_head_has_no_sequence_of_its_own_to_look_at():
    """A head's cache holds rows made from the target's hidden states, so only texts can show a mistake in it."""
    contexts = Contexts(cast(Any, None), 1, 1)
    assert trial.shadows(SimpleNamespace(followers=contexts), Sequence(1, [1], SamplingParams(), 0)) == []
