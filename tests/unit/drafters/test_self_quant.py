"""Drafting with the target's weights in fewer bits over its own cache: a copy, or the 4-bit part of 8-bit weights."""

import pytest
import torch
from lawkit import SAMPLED, Pair, assert_nothing_left, load_pair, make_engine, random_prompts, run, texts, write_model

from sameseed import LLM
from sameseed.batch import Rows, build_batch
from sameseed.config import SpecConfig
from sameseed.engine import build
from sameseed.engine.levels import Level
from sameseed.errors import ConfigError, RegistryError
from sameseed.kvcache.cache import KVCache
from sameseed.models.draft_format import is_nested
from sameseed.models.inner import nested_view
from sameseed.ops import resolve
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme

PROMPTS = random_prompts(6, seed=31)
GREEDY = SamplingParams(max_tokens=30, seed=2, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=30, seed=2, ignore_eos=True, **SAMPLED)


def test_it_needs_no_cache_and_no_prefill_of_its_own(pair, spied):
    engine = make_engine(pair, "self_quant", k=4)
    runner = engine.drafter.runner
    assert runner.cache is engine.runner.cache and runner.blocks is engine.runner.blocks
    pending = spied(runner, "forward", lambda seqs, draft, pending, **_: tuple(pending))
    run(engine, [[5] * 60], GREEDY)
    assert set(pending) == {(1,)}


def test_from_names(tmp_path):
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
        ("auto", model, "fp32"),  # the checkpoint's own format
        ("w8a8", model, "bf16"),  # more bits than the target
        ("w4a8", "self_quant", "w8a8"),
        ("w4a8", f"ngram > {model}", "w4a16"),  # stored in the same bits
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
def test_engines_in_turns_share_a_cache(pair, method):
    below = (SpecConfig("ngram"), SpecConfig("self_quant")) if method == "first" else None
    other = make_engine(pair, method, k=4, below=below)
    engine = make_engine(pair, method, k=4, below=below, target=other.runner)
    for one in (other, engine, other):
        assert texts(run(one, PROMPTS, GREEDY)) == texts(run(make_engine(pair), PROMPTS, GREEDY))
    twice = [2 * n for n in engine.metrics.num_accepted_tokens_per_pos]
    assert engine.runner.cache is other.runner.cache and other.metrics.num_accepted_tokens_per_pos == twice


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("nested") / "model"
    write_model(path)
    return path


@pytest.fixture(scope="module")
def nested(folder):
    pair = load_pair(folder, folder, weights="w8a8n")
    return Pair(pair.target, pair.draft, pair.tokenizer, nested_view(pair.target))


@pytest.mark.parametrize(
    ("params", "kv", "options"), [(GREEDY, "int8", {}), (DRAWN, "fp32", {"kv_window": 16, "kv_sink": 4})]
)
def test_the_text_is_the_targets_own(nested, params, kv, options):
    plain = texts(run(make_engine(nested, kv=kv), PROMPTS, params))
    for alone in (False, True):
        engine = make_engine(nested, "self_quant", k=4, kv=kv, options=options, block=4)
        assert texts(run(engine, PROMPTS, params, alone=alone)) == plain
        assert_nothing_left(engine)
        least = 0.12 if options else 0.4  # logits of tiny random weights differ little
        assert engine.metrics.acceptance_rate > least


def test_the_view_is_the_targets_memory(nested):
    mine = {t.data_ptr(): t.nbytes for m in nested.target.weights.matrices for t in m.parts.values()}
    lower = nested.low.weights
    assert all(mine[t.data_ptr()] == t.nbytes for m in lower.matrices for t in m.parts.values())
    assert [set(m.parts) for m in lower.layers[0].matrices] == [{"high", "scales"}] * 4
    assert lower.embedding is nested.target.weights.embedding
    assert lower.norm is nested.target.weights.norm


def test_nested_from_names(folder, monkeypatch):
    """A nested target drafts with its own low-bit weights by default; they are loaded and counted once."""
    loads = []
    demands = []
    load, plan = build.load_model, build.plan_blocks
    monkeypatch.setattr(build, "load_model", lambda *args: (loads.append(str(args[2])), load(*args))[1])
    monkeypatch.setattr(
        build, "plan_blocks", lambda c, n, d: (demands.append([x.weights for x in d]), plan(c, n, d))[1]
    )
    plain = LLM(str(folder), format="w8a8n").generate([PROMPTS[3]], GREEDY)[0].token_ids
    for named in ({}, {"draft_format": "nested"}, {"draft_format": "nested", "draft_options": {"kv_window": 32}}):
        llm = LLM(str(folder), "self_quant", format="w8a8n", num_draft_tokens=3, **named)
        target, lower = llm.engine.runner.model, llm.engine.drafter.runner.model
        assert lower.weights.lm_head.parts["high"] is target.weights.lm_head.parts["high"]
        assert llm.generate([PROMPTS[3]], GREEDY)[0].token_ids == plain
    assert loads == ["w8a8n"] * 4 and demands == [demands[0]] * 4 and len(demands[0]) == 1
    copy = LLM(str(folder), "self_quant", format="w8a8n", draft_format="w4a8")
    assert {m.format for m in copy.engine.drafter.runner.model.weights.matrices} == {"int4"}
    mixed = LLM(str(folder), "self_quant", format="w8a8n,lm_head=bf16", num_draft_tokens=3)
    assert mixed.engine.drafter.runner.model.weights.lm_head is mixed.engine.runner.model.weights.lm_head


def test_what_is_not_nested_says_the_remedy(folder, nested, pair):
    for scheme in ("w8a8", "auto", "int8n"):  # int8n for float rows is stored as whole bytes
        assert not is_nested(folder, QuantScheme.parse(scheme))
        with pytest.raises(ConfigError, match=r"--format w8a8n"):
            LLM(str(folder), "self_quant", format=scheme, draft_format="nested")
    with pytest.raises(ConfigError, match=r"--draft self_quant"):
        LLM(str(folder), str(folder), format="w8a8n", draft_format="nested")
    with pytest.raises(ConfigError, match=r"--format w8a8n"):
        nested_view(pair.target)
    assert is_nested(folder, QuantScheme.parse("bf16,model.layers.1.mlp.*=w8a8n"))
    with pytest.raises(RegistryError, match="no format 'nestde'"):
        Level.of(SpecConfig("self_quant", format="nestde"))


def test_drafts_leave_the_middle_of_a_long_context_out(nested, spied):
    """Whole blocks between sink and window are skipped: never a row not cached yet, and none if all rows fit."""
    engine = make_engine(nested, "self_quant", k=4, block=4, options={"kv_window": 10, "kv_sink": 6})

    def keys(batch, *_):
        at = batch.positions if batch.key_positions is None else batch.key_positions
        return int(batch.positions[0]) + 1, int(batch.kv_lens[0]), int(at[0]) + 1

    seen = spied(engine.drafter.runner.model, "run", keys)
    run(engine, [[7] * 12], GREEDY)
    assert len(seen) > 10
    for length, keys, position in seen:
        cached = length - 1
        left_out = max(0, (cached - 10) // 4 - 2) * 4
        assert keys == position == length - left_out
    assert any(keys < length for length, keys, _ in seen) and any(keys == length for length, keys, _ in seen)


def test_rows_attend_to_what_is_seen_as_if_nothing_else_were(nested):
    """Attention without the middle blocks has the bits of attention over the other blocks alone, direct or replayed."""
    model, ops = nested.target, nested.target.ops
    shape = model.config
    cache = KVCache(shape.kv_shapes[:1], 8, 4)
    for part in (cache.layers[0].k, cache.layers[0].v):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    blocks, kept = [3, 1, 6, 0, 5, 2], [3, 5, 2]
    parents = [-1, 0, -1]
    part = build_batch([Rows([9, 9], 18, [8, 8, 8], parents, blocks, True, (1, 4))], 4)
    alone = build_batch([Rows([9, 9], 6, [8, 8, 8], parents, kept, True)], 4)
    assert part.positions.equal(alone.positions + 12) and part.slots.equal(alone.slots)
    q = torch.randn(5, shape.num_heads, shape.head_dim, generator=torch.Generator().manual_seed(2))
    for chosen in (ops, resolve("reference")):
        outs = [chosen.attention(q, cache.layers[0], batch, 0.5) for batch in (part, alone)]
        assert outs[0].equal(outs[1])
    full = KVCache(shape.kv_shapes, 8, 4)
    with torch.inference_mode():
        replayed = model.run(part, full)[0].clone()
        assert replayed.equal(model._forward(ops, part, full, ())[0])
