"""What a target says is counted over its runs, and decides which tokens a draft model may draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lawkit import Pair

from sameseed import store
from sameseed.cost.said import SaidTokens
from sameseed.engine.calibrate import measure_engine
from sameseed.engine.llm import LLM
from sameseed.request import SamplingParams


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))


def test_rows_that_the_target_never_needs_are_cut(pair: Pair, pair_folders: tuple[Path, Path]) -> None:
    said = SaidTokens(pair_folders[0])
    assert said.vocabulary(pair.draft, pair.target) == "", "nothing was counted yet"
    said.add([token for token in range(100, 164) for _ in range(50)])
    assert json.loads(said.vocabulary(pair.draft, pair.target)) == list(range(100, 164))
    assert SaidTokens(pair_folders[0]).counts == said.counts
    said.counts.clear()
    said.add(range(200))
    assert said.vocabulary(pair.draft, pair.target) == "", "each token is new: the next one will be, too"


def test_what_measuring_generated_is_not_counted(pair_folders: tuple[Path, Path]) -> None:
    target, draft = map(str, pair_folders)
    with LLM(target, draft, draft_options={"vocabulary": "auto"}, max_num_seqs=2) as llm:
        measure_engine(llm.engine, 0.05)
    assert not SaidTokens(pair_folders[0]).counts


def test_an_engine_counts_and_the_next_one_drafts_what_was_said(pair_folders: tuple[Path, Path]) -> None:
    target, draft = map(str, pair_folders)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    found = []
    for options in ({}, {"vocabulary": "auto"}, {"vocabulary": "auto"}):
        with LLM(target, draft, policy="fixed", draft_options=options, max_num_seqs=2) as llm:
            found.append([c.token_ids for c in llm.generate([[5, 6, 7], [8, 9]], params)])
    assert found[0] == found[1] == found[2]
    assert set(SaidTokens(pair_folders[0]).counts) == {token for ids in found[0] for token in ids}
