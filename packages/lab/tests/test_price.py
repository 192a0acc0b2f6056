from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sameseed import LLM
from sameseed.request import SamplingParams
from sameseed_lab.studies._bench import _shared, price


@pytest.fixture(scope="module")
def pair(pair_folders: tuple[Path, Path]) -> LLM:
    target, draft = map(str, pair_folders)
    return LLM(target, draft, policy="fixed", num_draft_tokens=3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_drafts_for_itself_loses_nothing(pair: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=3)
    prompt = pair.tokenizer.encode("def add(a")
    text = pair.generate("def add(a", params)[0].token_ids
    jobs = [(prompt, text, params)]
    runner = pair.engine.runner
    same = price(runner, runner, jobs)
    assert same["coupled"] == 1.0 and same["min_pq"] == pytest.approx(1.0)
    other = price(runner, pair.engine.drafter.runner, jobs)  # type: ignore[attr-defined]
    assert other["positions"] == len(text)
    if temperature == 0.0:
        assert other["coupled"] == other["min_pq"], "greedy decoding pays nothing"
    assert price(runner, runner, []) == {}


def test_the_shared_probability() -> None:
    params = SamplingParams(temperature=1.0)
    p, q = (np.log(np.array(row, np.float32)) for row in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]))
    assert _shared(p, q, params) == pytest.approx(0.7)
    assert _shared(p, np.append(q, np.float32(-1e9)), params) == pytest.approx(0.7), "a padded vocabulary"
    assert _shared(p, q, SamplingParams(temperature=0.0)) == 0.0
