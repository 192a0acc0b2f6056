"""The parallel drafter: one pass guesses at all masks, its cache keeps no mask rows, its config selects it."""

import json
import logging
from dataclasses import replace

import pytest
from lawkit import MODEL_VOCAB, SAMPLED, Pair, make_engine, random_prompts, run, texts, write_model

from sameseed.config import EngineConfig, parse_draft
from sameseed.engine.build import build_engine
from sameseed.engine.levels import resolve
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.kvcache.cache import KVCache
from sameseed.models.config import is_parallel
from sameseed.models.llama import Llama
from sameseed.models.loader import read_config
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.sampling import choose

PROMPTS = random_prompts(5, seed=4)
ASKED = SamplingParams(max_tokens=40, seed=6, ignore_eos=True, **SAMPLED)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
MASK = MODEL_VOCAB - 1


def remade(model, **changes):
    """The same weights with other config fields."""
    return Llama(replace(model.config, **changes), model.weights, model.ops)


def with_draft(pair, **changes):
    return Pair(pair.target, remade(pair.draft, **changes), pair.tokenizer)


def by_hand(model, seq, count):
    """The chain, each token from a separate pass over the whole text and the masks before that token."""
    chain = []
    c = model.config
    for i in range(count):
        runner = ModelRunner(model, KVCache(c.kv_shapes, 16, 16, "fp32"))
        text = Sequence(0, [*seq.token_ids, *[MASK] * i], SamplingParams(), 0)
        assert runner.blocks.reserve(text, len(text))
        logits = runner.forward([text], Draft.empty(1), [len(text)]).logits
        chain.append(choose(logits[0].numpy(), seq, chain, c.eos_token_ids))
    return chain


def test_guesses_are_the_models_own_behind_masks(pair):
    """Drafts of several rounds, right and wrong, greedy and sampled, equal those of `by_hand`."""
    engine = make_engine(pair, "parallel", k=5, block=4)
    seqs = [Sequence(i, p, params, 7 + i) for i, (p, params) in enumerate(zip(PROMPTS, [ASKED, GREEDY] * 3))]
    for taken in (0, 2, 5, 1):
        draft = engine.drafter.propose(seqs, [5] * len(seqs))
        assert [draft.nodes(b)[0] for b in range(len(seqs))] == [by_hand(pair.draft, seq, 5) for seq in seqs]
        for b, seq in enumerate(seqs):
            seq.token_ids += [*draft.nodes(b)[0][:taken], 9]


def test_a_draft_of_any_length_is_one_pass(pair, spied):
    engine = make_engine(pair, "parallel", k=7)
    rows = spied(engine.drafter.runner, "forward", lambda _, draft, pending, **more: (sum(pending), len(draft.tokens)))
    seqs = [Sequence(i, p, GREEDY, 0) for i, p in enumerate(PROMPTS)]
    draft = engine.drafter.propose(seqs, [7, 1, 0, 3, 7])
    assert [draft.count(b) for b in range(5)] == [7, 1, 0, 3, 7]
    assert rows == [(sum(len(p) for i, p in enumerate(PROMPTS) if i != 2), 6 + 0 + 2 + 6)]


def test_more_than_it_was_trained_for_is_capped_and_said_once(pair, caplog):
    engine = make_engine(with_draft(pair, num_parallel=3), "parallel", k=6)
    with caplog.at_level(logging.WARNING, "sameseed"):
        done = run(engine, PROMPTS, ASKED)
    assert texts(done) == texts(run(make_engine(pair), PROMPTS, ASKED))
    assert len(engine.metrics.num_accepted_tokens_per_pos) <= 6
    assert engine.metrics.num_draft_tokens <= 3 * engine.metrics.num_drafts
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and "trained for 3" in said[0], said


@pytest.mark.parametrize(("mask", "options"), [(None, {}), (MASK, {"mask_token": MODEL_VOCAB})])
def test_a_draft_without_a_mask_token(pair, mask, options):
    with pytest.raises(ConfigError, match="mask_token"):
        make_engine(with_draft(pair, mask_token=mask), "parallel", options=options)
    make_engine(with_draft(pair, mask_token=mask), "parallel", options={"mask_token": 5})


def config_of(folder, **changes):
    write_model(folder, noise=0.04, **changes)
    return read_config(folder)


def test_published_fields(tmp_path):
    """Field names of AMD (pard_token, spd_type) and vLLM (ptd_token_id); -1 means none. Training writes `para_num`."""
    pard = config_of(tmp_path / "a", pard_token=MASK, spd_type="pard")
    assert (pard.mask_token, pard.num_parallel) == (MASK, 0) and is_parallel(tmp_path / "a")
    assert config_of(tmp_path / "b", ptd_token_id=7, para_num=8).mask_token == 7 and is_parallel(tmp_path / "b")
    assert read_config(tmp_path / "b").num_parallel == 8
    plain = config_of(tmp_path / "c", pard_token=-1)
    assert plain.mask_token is None and not is_parallel(tmp_path / "c")
    assert not is_parallel(tmp_path / "nothing.gguf")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spd_type": "pard"}, "mask token"), ({"pard_token": MODEL_VOCAB}, "pard_token"),
        ({"pard_token": 3, "para_num": -2}, "para_num"), ({"spd_type": "pard2", "pard_token": 3}, "'pard'"),
    ],
)  # fmt: skip
def test_what_cannot_draft_in_parallel(pair_folders, tmp_path, changes, said):
    write_model(tmp_path / "draft")
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**raw, **changes}))
    config = EngineConfig(spec=parse_draft(str(tmp_path / "draft")))
    with pytest.raises(ModelLoadError, match=said):
        build_engine(str(pair_folders[0]), config)


def test_a_folder_with_a_mask_token_is_drafted_with_in_parallel(pair_folders, tmp_path):
    write_model(tmp_path / "draft", noise=0.04, pard_token=MASK, spd_type="pard", para_num=4)
    name = str(tmp_path / "draft")
    assert resolve(parse_draft(f"ngram + {name}")).spec.below[1].method == "parallel"
    engine = build_engine(str(pair_folders[0]), EngineConfig(max_num_seqs=2, spec=parse_draft(name)))
    assert engine.drafter.mask == MASK and engine.drafter.most == 4
