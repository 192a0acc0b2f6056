"""Drafting by the 4-bit weights inside the target's 8-bit ones, and by a part of its cache: the text is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lawkit import (
    SAMPLED,
    Pair,
    assert_nothing_left,
    load_pair,
    make_engine,
    random_prompts,
    run,
    texts,
    write_model,
)

from sameseed import LLM
from sameseed.batch import Rows, build_batch
from sameseed.config import EngineConfig, SpecConfig
from sameseed.engine import build
from sameseed.errors import ConfigError, RegistryError
from sameseed.kvcache.cache import KVCache
from sameseed.models.nested import is_nested, nested_view
from sameseed.ops import resolve
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme

PROMPTS = random_prompts(6, seed=17)
GREEDY = SamplingParams(max_tokens=30, seed=2, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=30, seed=2, ignore_eos=True, **SAMPLED)
both = pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "sampled"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nested") / "model"
    write_model(path)
    return path


@pytest.fixture(scope="module")
def nested(folder: Path) -> Pair:
    pair = load_pair(folder, folder, weights="w8a8n")
    return Pair(pair.target, pair.draft, pair.tokenizer, nested_view(pair.target))


@both
@pytest.mark.parametrize("kv", ["fp32", "int8"])
@pytest.mark.parametrize("options", [{}, {"kv_window": 16, "kv_sink": 4}], ids=["whole", "window"])
def test_the_text_is_the_targets_own(nested: Pair, kv: str, params: SamplingParams, options: dict[str, object]) -> None:
    plain = texts(run(make_engine(nested, kv=kv), PROMPTS, params))
    for alone in (False, True):
        engine = make_engine(nested, "self_quant", k=4, kv=kv, options=options, block=4)
        assert texts(run(engine, PROMPTS, params, alone=alone)) == plain
        assert_nothing_left(engine)
        assert engine.metrics.acceptance_rate is not None
        least = 0.12 if options else 0.4  # tiny random weights tell tokens apart by little
        assert engine.metrics.acceptance_rate > least


def test_the_view_is_the_targets_memory(nested: Pair) -> None:
    assert nested.low is not None
    mine = {t.data_ptr(): t.nbytes for m in nested.target.weights.matrices for t in m.parts.values()}
    lower = nested.low.weights
    assert all(mine[t.data_ptr()] == t.nbytes for m in lower.matrices for t in m.parts.values())
    assert [set(m.parts) for m in lower.layers[0].matrices] == [{"high", "scales"}] * 4
    assert lower.embedding is nested.target.weights.embedding
    assert lower.norm is nested.target.weights.norm


def test_from_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nested target drafts with its own lower weights where nothing is said; they are loaded, and counted, once."""
    loads: list[str] = []
    demands: list[list[int]] = []
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


def test_what_is_not_nested_says_the_remedy(folder: Path, nested: Pair, pair: Pair) -> None:
    for scheme in ("w8a8", "auto", "int8n"):  # int8n with float rows is stored in whole bytes
        assert not is_nested(folder, QuantScheme.parse(scheme))
        with pytest.raises(ConfigError, match=r"--format w8a8n, or take a copy in another --draft-format"):
            LLM(str(folder), "self_quant", format=scheme, draft_format="nested")
    with pytest.raises(ConfigError, match=r"take --draft self_quant, or another --draft-format"):
        LLM(str(folder), str(folder), format="w8a8n", draft_format="nested")
    with pytest.raises(ConfigError, match=r"weights in fp32 hold no 4-bit ones; load the target with --format w8a8n"):
        nested_view(pair.target)
    for bad in ({"kv_window": -1}, {"kv_sink": -3}):
        with pytest.raises(ConfigError, match="0 or more"):
            build.check_options(SpecConfig("self_quant", options=bad))
    assert is_nested(folder, QuantScheme.parse("bf16,model.layers.1.mlp.*=w8a8n"))
    with pytest.raises(RegistryError, match="no format 'nestde'"):
        build.check_options(SpecConfig("self_quant", format="nestde"))
    build.check_options(SpecConfig("self_quant", format="nested"))
    build.check_options(EngineConfig(spec=SpecConfig("self_quant", options={"kv_window": 5})).spec)


def test_drafts_leave_the_middle_of_a_long_context_out(nested: Pair) -> None:
    """Blocks from the first after the sink to the window: never a row that is not cached yet, and all where it fits."""
    engine = make_engine(nested, "self_quant", k=4, block=4, options={"kv_window": 10, "kv_sink": 6})
    seen: list[tuple[int, int, int]] = []
    runner = engine.drafter.runner
    forward = runner.model.forward

    def watch(batch, cache, captures=()):  # type: ignore[no-untyped-def]
        at = batch.positions if batch.key_positions is None else batch.key_positions
        seen.append((int(batch.positions[0]) + 1, int(batch.kv_lens[0]), int(at[0]) + 1))
        return forward(batch, cache, captures)

    runner.model.forward = watch
    try:
        run(engine, [[7] * 12], GREEDY)
    finally:
        del runner.model.forward
    assert len(seen) > 10
    for length, keys, position in seen:
        cached = length - 1
        left_out = max(0, (cached - 10) // 4 - 2) * 4
        assert keys == position == length - left_out
    assert any(keys < length for length, keys, _ in seen) and any(keys == length for length, keys, _ in seen)


def test_rows_attend_to_what_is_seen_as_if_nothing_else_were(nested: Pair) -> None:
    """Without the blocks in the middle: the bits of attention over the others alone, in calls and in plans."""
    model, ops = nested.target, nested.target.ops
    shape = model.config
    cache = KVCache(1, 8, 4, shape.num_kv_heads, shape.head_dim)
    for part in (cache.layers[0].k, cache.layers[0].v):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    blocks, kept = [3, 1, 6, 0, 5, 2], [3, 5, 2]
    parents = [-1, 0, -1]
    part = build_batch([Rows([9, 9], 18, [8, 8, 8], parents, blocks, True, (1, 4))], 4)
    alone = build_batch([Rows([9, 9], 6, [8, 8, 8], parents, kept, True)], 4)
    assert part.positions.equal(alone.positions + 12) and part.slots.equal(alone.slots)
    q = torch.randn(5, shape.num_heads, shape.head_dim, generator=torch.Generator().manual_seed(2))
    for chosen in (ops, resolve("reference")):
        outs = [chosen.attention(q, cache.layer(0), batch, 0.5) for batch in (part, alone)]
        assert outs[0].equal(outs[1])
    full = KVCache(shape.num_layers, 8, 4, shape.num_kv_heads, shape.head_dim)
    with torch.inference_mode():
        replayed = model.forward(part, full)[0].clone()
        assert replayed.equal(model._forward(ops, part, full, ())[0])
