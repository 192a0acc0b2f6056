"""The block drafter: one pass guesses from the target's hidden states; rejected guesses leave no trace in its cache."""

from dataclasses import dataclass, replace

import pytest
from fixtures_block import parsed, plain_block, raw_config, selected
from fixtures_eagle import random_head, target_states, write_head
from lawkit import MODEL_VOCAB, SAMPLED, Pair, assert_nothing_left, make_engine, random_prompts, run, texts
from torch import Tensor

from sameseed.config import EngineConfig, SpecConfig, parse_draft
from sameseed.engine.build import build_engine
from sameseed.engine.levels import resolve
from sameseed.errors import ConfigError
from sameseed.kvcache.cache import KVCache
from sameseed.models.block import BlockRunner
from sameseed.models.eagle_loader import load_head
from sameseed.request import Request, SamplingParams, Sequence
from sameseed.spec.sampling import choose
from sameseed.spec.step import decode_step

PROMPTS = random_prompts(5, seed=4)
ASKED = SamplingParams(max_tokens=40, seed=6, ignore_eos=True, **SAMPLED)
WARM = SamplingParams(temperature=0.8)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@dataclass(frozen=True)
class Loud:
    """A pair whose block head has large random weights, so that every part of the head affects the guesses."""

    pair: Pair
    tensors: dict[str, Tensor]


@pytest.fixture(scope="module", params=["dspark", "DFlash2"])
def loud(pair, request, tmp_path_factory):
    raw = raw_config(request.param, MODEL_VOCAB, [0, 1], block_size=7)
    tensors = random_head(parsed(raw), 1)
    del tensors["d2t"]
    head = load_head(write_head(tmp_path_factory.mktemp("loud"), raw, tensors), pair.target, pair.target.ops)
    return Loud(replace(pair, block=head), tensors)


def by_hand(loud, seq, count):
    """The chain by the papers' formulas, from the target's hidden states of the whole text."""
    config, w, target = loud.pair.block.config, loud.tensors, loud.pair.target
    ((states, _),) = target_states(target, [seq.token_ids[:-1]], config.captures(2))
    chain, second = [], config.selector_rank > 0
    found = plain_block(config, w, states, seq.token_ids[-1], target, second)
    rows, gates = found if second else (found, [None] * len(found))
    for row, gate in zip(rows[:count], gates):
        last = (chain or seq.token_ids)[-1]
        if second:
            biased = selected(config, w, row, last, gate)
        else:
            biased = row + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][last]
        chain.append(choose(biased.numpy(), seq, chain, target.config.eos_token_ids))
    return chain


def test_guesses_are_the_heads_own_over_the_targets_states(loud):
    """Drafts of several rounds, with right and wrong guesses, equal those of `by_hand`."""
    engine = make_engine(loud.pair, "block", k=5, block=4)
    seqs = [Sequence(i, p, [GREEDY, WARM][i % 2], 7 + i) for i, p in enumerate(PROMPTS[1:])]
    for seq in seqs:
        assert engine.runner.blocks.reserve(seq, 200)
    for _ in range(5):
        decode_step(engine.runner, engine.drafter, seqs, [s.num_pending for s in seqs], [5] * len(seqs))
        again = engine.drafter.propose(seqs, [5] * len(seqs))
        assert [again.nodes(b)[0] for b in range(len(seqs))] == [by_hand(loud, seq, 5) for seq in seqs]


@pytest.mark.parametrize("kv", ["fp32", "int8"])
def test_the_cache_after_every_round_is_that_of_fresh_states(pair, kv):
    """The head's cache equals, bit for bit, one made from fresh states: no block rows, no trace of wrong guesses."""
    engine = make_engine(pair, "block", k=5, block=4, kv=kv)
    drafter, compared = engine.drafter, 0
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(f"r{i}", tuple(prompt), [ASKED, GREEDY][i % 2], i, 0))
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            if seq.seq_id not in drafter.followers._contexts:
                continue
            holder = drafter.followers[seq].holder
            if not holder.num_cached:
                continue
            head = pair.block
            c, cache = head.config.layer, drafter.runner.cache
            fresh = BlockRunner(head, KVCache(c.kv_shapes, 64, 4, kv))
            kept = Sequence(0, (), SamplingParams(), 0)
            assert fresh.blocks.reserve(kept, holder.num_cached)
            ((states, _),) = target_states(pair.target, [seq.token_ids[: holder.num_cached]], drafter.captures, kv)
            fresh.extend([kept], [seq.token_ids[: holder.num_cached]], [states], False)
            for own, other in zip(cache.layers, fresh.cache.layers, strict=True):
                for part in ("k", "v"):
                    mine, its = (
                        getattr(layer, part)[blocks].flatten(0, 1)[: holder.num_cached]
                        for layer, blocks in ((own, holder.blocks), (other, kept.blocks))
                    )
                    assert mine.equal(its)
            compared += holder.num_cached
    assert compared > 500
    assert 0 < engine.metrics.num_accepted_tokens < engine.metrics.num_draft_tokens
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    "options", [{"prefill_rows": 1}, {"prefill_rows": 7, "siblings": 2}, {"vocabulary": "200"}], ids=str
)
def test_laws_with_every_option(pair, options):
    engine = make_engine(pair, "block", k=7, options=options)
    for asked in (ASKED, GREEDY):
        assert texts(run(engine, PROMPTS, asked)) == texts(run(make_engine(pair), PROMPTS, asked))
    assert engine.metrics.num_accepted_tokens > 0


def test_a_folder_of_a_block_head_is_drafted_with_as_one(pair_folders):
    target = pair_folders[0]
    block, head = str(target.parent / "block"), str(target.parent / "head")
    assert resolve(parse_draft(block)).spec.method == "block"
    assert resolve(parse_draft(head)).spec.method == "eagle"
    engine = build_engine(str(target), EngineConfig(max_num_seqs=2, spec=parse_draft(block)))
    assert engine.drafter.runner.model.config.num_guesses == 7
    for method, model, other in (("eagle", block, "block"), ("block", head, "eagle")):
        with pytest.raises(ConfigError, match=f"--draft {other}"):
            build_engine(str(target), EngineConfig(max_num_seqs=2, spec=SpecConfig(method, model)))
    with pytest.raises(ConfigError, match="--draft"):
        build_engine(str(target), EngineConfig(max_num_seqs=2, spec=SpecConfig("block", str(pair_folders[1]))))
