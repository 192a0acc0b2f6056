"""Laws 1 and 3 of every family of models, with every drafter, in the cases that broke others."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures_block import fit_block
from fixtures_eagle import fit_head
from lawkit import DRAFTERS, FAMILIES, SAMPLED, Pair, load_pair, make_engine, random_prompts, run, texts, write_model

from conftest import DRAFT_NOISE
from sameseed import ops
from sameseed.models.loader import load_model
from sameseed.request import SamplingParams


@pytest.fixture(scope="module", params=[n for n in FAMILIES if n != "llama"])  # the other tests have Llama
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp(request.param)
    write_model(root / "target", **FAMILIES[request.param])
    write_model(root / "draft", noise=DRAFT_NOISE, **FAMILIES[request.param])
    target = load_model(root / "target", ops.resolve())
    fit_head(root / "head", target)
    fit_block(root / "block", target)
    return load_pair(root / "target", root / "draft")


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_law_1(pair: Pair, name: str, sampling: dict[str, Any]) -> None:
    """Batches of mixed lengths with chunked prompts and too few blocks, against each prompt alone."""
    prompts = random_prompts(8, seed=21)
    asked = SamplingParams(max_tokens=30, seed=3, ignore_eos=True, **sampling)
    alone = texts(run(make_engine(pair), prompts, asked, alone=True))
    assert texts(run(make_engine(pair, name), prompts, asked)) == alone
    assert texts(run(make_engine(pair, name, k=6, rows=24, block=4, tokens=256), prompts, asked)) == alone
