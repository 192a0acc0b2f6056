"""Caches of drafts: what the check of them looks at, and what it notices."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from proof.mutants import toy_subject

from sameseed.drafters._eagle_context import Contexts
from sameseed.laws import trial
from sameseed.laws.check import FAILED, PASSED, Effort, run_check
from sameseed.laws.logits import cache_rows
from sameseed.request import SamplingParams, Sequence
from sameseed.tokenizer import Tokenizer

QUICK = Effort(1e-9)


@pytest.fixture
def subject(pair_folders):
    return toy_subject(Tokenizer.from_folder(pair_folders[0]))


def looked(check, subject):
    return run_check(check, subject, QUICK)


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
