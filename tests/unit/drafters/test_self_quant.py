"""Drafting by a low-bit copy of the target in the target's own cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from lawkit import SAMPLED, Pair, assert_nothing_left, make_engine, random_prompts, run, texts, write_model

from sameseed import LLM
from sameseed.config import SpecConfig
from sameseed.errors import ConfigError
from sameseed.request import SamplingParams
from sameseed.spec.drafter import level_metrics

PROMPTS = random_prompts(6, seed=31)
GREEDY = SamplingParams(max_tokens=30, seed=2, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=30, seed=2, ignore_eos=True, **SAMPLED)
both = pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "sampled"])


@both
@pytest.mark.parametrize("kv", ["fp32", "int8"])
@pytest.mark.parametrize("k", [1, 5])
def test_the_copy_leaves_no_trace_in_the_cache(pair: Pair, k: int, kv: str, params: SamplingParams) -> None:
    plain = texts(run(make_engine(pair, kv=kv), PROMPTS, params))
    engine = make_engine(pair, "self_quant", k=k, kv=kv)
    assert texts(run(engine, PROMPTS, params)) == plain
    assert engine.metrics.acceptance_rate is not None and engine.metrics.acceptance_rate > 0.7
    assert_nothing_left(engine)


def test_a_copy_in_the_same_format_is_always_right(pair: Pair) -> None:
    engine = make_engine(Pair(pair.target, pair.draft, pair.tokenizer), "self_quant", k=4)
    run(engine, PROMPTS, DRAWN)
    assert engine.metrics.acceptance_rate == 1.0


def test_it_needs_no_cache_and_no_prefill_of_its_own(pair: Pair) -> None:
    engine = make_engine(pair, "self_quant", k=4)
    runner = engine.drafter.runner
    assert runner.cache is engine.runner.cache and runner.blocks is engine.runner.blocks
    rows: list[int] = []
    forward = runner.forward
    runner.forward = lambda seqs, draft, pending: (rows.extend(pending), forward(seqs, draft, pending))[1]
    run(engine, [[5] * 60], GREEDY)
    assert set(rows) == {1}


@both
def test_scarce_blocks_and_rows(pair: Pair, params: SamplingParams) -> None:
    plain = texts(run(make_engine(pair), PROMPTS, params))
    for settings in ({"tokens": 160}, {"rows": 9, "block": 1, "tokens": 200}):
        engine = make_engine(pair, "self_quant", k=6, **settings)
        assert texts(run(engine, PROMPTS, params)) == plain


def test_below_a_cascade_it_copies_the_middle_model(pair: Pair) -> None:
    plain = texts(run(make_engine(pair), PROMPTS, GREEDY))
    engine = make_engine(pair, "cascade", k=6, below=(SpecConfig("self_quant", num_draft_tokens=3),))
    assert texts(run(engine, PROMPTS, GREEDY)) == plain
    assert level_metrics(engine.drafter)[-1][1].acceptance_rate == 1.0


def test_from_names(tmp_path: Path) -> None:
    write_model(tmp_path / "model", noise=0.0)
    llm = LLM(str(tmp_path / "model"), "self_quant", format="fp32", num_draft_tokens=3)
    assert {w.format for w in llm.engine.drafter.runner.model.weights.matrices} == {"int4"}
    prompt = PROMPTS[0]
    plain = LLM(str(tmp_path / "model"), format="fp32")
    assert llm.generate([prompt], GREEDY)[0].token_ids == plain.generate([prompt], GREEDY)[0].token_ids
    with pytest.raises(ConfigError, match="draft for itself"):
        LLM(str(tmp_path / "model"), "self_quant", format="w4a8")
    model = str(tmp_path / "model")
    for spelled, draft, its in (
        ("auto", model, "fp32"),  # as the checkpoint has it
        ("w8a8", model, "w8a8,lm_head=w8a8"),
        ("w8a8", model, "bf16"),  # higher than the target's
        ("w4a8", "self_quant", "w8a8"),
        ("w4a8", f"ngram > {model}", "w4a16"),  # stored alike
    ):
        with pytest.raises(ConfigError, match="draft for itself"):
            LLM(model, draft, format=spelled, draft_format=its)
    with pytest.raises(ConfigError, match="no module fits the rule"):
        LLM(model, "self_quant", format="w4a8", draft_format="w8a8,lm_haed=w4a8")
    assert LLM(model, "self_quant", format="w8a8", draft_format="w8a8,lm_head=w4a8").config.spec.method == "self_quant"
    write_model(tmp_path / "draft", noise=0.1)
    twice = f"{tmp_path / 'draft'} > {tmp_path / 'draft'}"
    for draft in (model, f"ngram > {model}", twice):
        with pytest.raises(ConfigError, match="draft for itself"):
            LLM(model, draft)


@pytest.mark.parametrize("method", ["self_quant", "first"])
def test_engines_in_turns_share_a_cache(pair: Pair, method: str) -> None:
    below = (SpecConfig("ngram"), SpecConfig("self_quant")) if method == "first" else None
    other = make_engine(pair, method, k=4, below=below)
    engine = make_engine(pair, method, k=4, below=below, target=other.runner)
    for one in (other, engine, other):
        assert texts(run(one, PROMPTS, GREEDY)) == texts(run(make_engine(pair), PROMPTS, GREEDY))
    twice = [2 * n for n in engine.metrics.num_accepted_tokens_per_pos]
    assert engine.runner.cache is other.runner.cache and other.metrics.num_accepted_tokens_per_pos == twice
