"""The eagle drafter: trees of the likeliest paths, unchanged texts, and a head's cache of certain tokens only."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures_eagle import knowing_head, random_head, raw_config, silence, write_head
from lawkit import MODEL_VOCAB, SAMPLED, load_pair, make_engine, random_prompts, run, texts, write_model

from sameseed import ops
from sameseed.config import EngineConfig, SpecConfig, parse_draft
from sameseed.engine.build import build_engine
from sameseed.errors import ConfigError
from sameseed.models.eagle_loader import load_head
from sameseed.models.head_config import parse_head_config
from sameseed.request import SamplingParams, Sequence
from sameseed.scheme import QuantScheme
from sameseed.spec.drafter import Span, level_metrics
from sameseed.spec.step import decode_step

PROMPTS = random_prompts(5, seed=4)
GREEDY = SamplingParams(max_tokens=24, seed=6, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=24, seed=6, ignore_eos=True, **SAMPLED)
PENALIZED = replace(DRAWN, repetition_penalty=1.3, logit_bias={7: 3.0})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Targets that heads can predict nearly perfectly, and such heads of both kinds.

    The embeddings of "small" are small beside what its first layer adds, since EAGLE-3 has no place for the embedding
    itself.
    """
    root = tmp_path_factory.mktemp("heads")
    write_model(root / "target")
    write_model(root / "small")
    write_model(root / "draft", noise=0.04)
    silence(root / "target", 1.0)
    silence(root / "small", 0.05)
    torch.manual_seed(3)
    knowing_head(root / "eagle", root / "target", "eagle", noise=0.1)
    knowing_head(root / "eagle3", root / "small", "eagle3", draft_vocab_size=290)
    return root


@pytest.fixture(scope="module")
def easy(folders):
    pair = load_pair(folders / "target", folders / "draft")
    return replace(pair, head=load_head(folders / "eagle", pair.target, ops.resolve()))


def pair_of(folders, easy, head):
    """The target that a kind of head is made for, with that head."""
    if head == "eagle":
        return easy
    pair = load_pair(folders / "small", folders / "draft")
    return with_head(pair, folders / head)


def with_head(pair, folder, quant="auto"):
    return replace(pair, head=load_head(folder, pair.target, ops.resolve(), QuantScheme.parse(quant)))


def engine_of(pair, k=12, confidence=None, block=16, **options):
    """An engine that drafts with the pair's head (k = 0: not at all)."""
    return make_engine(pair, "eagle" if k else "none", k, confidence, options=options, block=block)


@pytest.mark.parametrize(("head", "asked"), [("eagle", GREEDY), ("eagle3", DRAWN), ("eagle3", PENALIZED)])
def test_the_text_stays_and_trees_are_accepted(folders, easy, head, asked):
    pair = pair_of(folders, easy, head)
    plain = texts(run(engine_of(pair, 0), PROMPTS, asked, alone=True))
    lengths = []
    for k, top_k in ((4, 1), (4, 8), (32, 8)):
        engine = engine_of(pair, k, top_k=top_k)
        assert texts(run(engine, PROMPTS, asked)) == plain
        lengths.append(engine.metrics.mean_acceptance_length)
    assert lengths[0] > 1.4, "a chain of a head that knows the target is mostly right"
    assert lengths[2] > lengths[0], "a large tree hits more than a chain"


def test_candidates_are_ranked_as_the_request_asks(easy):
    """By bans and by penalties for the drafted path itself, as the target will choose."""
    guesses = engine_of(easy).drafter.guesses
    rows = np.zeros((1, MODEL_VOCAB), np.float32)
    rows[0, [5, 6, 7]] = 9.0, 8.0, 7.0
    asked = replace(GREEDY, banned_token_ids=(5,), frequency_penalty=2.0)
    tokens, _ = guesses.after(rows, Sequence(0, PROMPTS[4], asked, 1), [[3, 6]], 2)
    assert tokens.tolist() == [[7, 6]]


@pytest.mark.parametrize(("k", "least"), [(1, None), (5, None), (12, None), (64, None), (12, 0.2)])
@pytest.mark.parametrize("head", ["eagle", "eagle3"])
def test_trees_that_grow_in_one_call_are_those_that_grow_level_by_level(folders, easy, spied, head, k, least):
    engine = engine_of(pair_of(folders, easy, head), k, depth=6, top_k=5, block=4, confidence=least)
    runner = engine.drafter.runner
    given = spied(runner, "grow")
    in_one_call = runner.grow
    flat = replace(DRAWN, temperature=1.5, top_p=1.0)
    ending = replace(GREEDY, ignore_eos=False, stop_token_ids=tuple(range(0, MODEL_VOCAB, 3)))
    asked = [GREEDY, DRAWN, replace(flat, top_k=7), replace(flat, min_p=0.02), ending]
    seqs = [Sequence(i, prompt, how, 100 + i) for i, (prompt, how) in enumerate(zip(PROMPTS, asked, strict=True))]
    num_draft = [0] * len(seqs)
    for _ in range(6):
        for seq in seqs:
            assert engine.runner.blocks.reserve(seq, len(seq) + k)
        decode_step(engine.runner, engine.drafter, seqs, [s.num_pending for s in seqs], num_draft)
        num_draft = [max(1, k - i) for i in range(len(seqs))]
        runner.grow = in_one_call
        found = engine.drafter.propose(seqs, num_draft)
        runner.grow = lambda *_: None
        wanted = engine.drafter.propose(seqs, num_draft)
        assert [found.nodes(b) for b in range(len(seqs))] == [wanted.nodes(b) for b in range(len(seqs))]
        assert found.confidence is not None and wanted.confidence is not None
        np.testing.assert_allclose(found.confidence, wanted.confidence, rtol=1e-12)
    assert len(given) == 6 and None not in given, "this head's passes are one plan"


def rounds(engine, seq, count, k=12):
    for _ in range(count):
        assert engine.runner.blocks.reserve(seq, len(seq) + k)
        decode_step(engine.runner, engine.drafter, [seq], [seq.num_pending], [k if seq.num_output else 0])


def read_anew(engine, seq):
    """A new sequence with the same text; this engine has run all of its tokens but the last."""
    again = Sequence(0, seq.token_ids, seq.params, seq.seed)
    again.num_prompt = seq.num_prompt
    assert engine.runner.blocks.reserve(again, len(again))
    decode_step(engine.runner, engine.drafter, [again], [len(again) - 1], [0])
    return again


@pytest.mark.parametrize("head", ["eagle", "eagle3"])
def test_a_guess_is_that_of_a_head_that_sees_the_text_anew(folders, easy, head):
    """Accepted and rejected nodes leave no trace: after some rounds the tree is that of a fresh drafter."""
    pair = pair_of(folders, easy, head)
    engine, fresh = engine_of(pair), engine_of(pair)
    seq = Sequence(0, PROMPTS[4], DRAWN, 9)
    for _ in range(6):
        rounds(engine, seq, 3)
        again = read_anew(fresh, seq)
        assert engine.drafter.propose([seq], [12]).nodes(0) == fresh.drafter.propose([again], [12]).nodes(0)
        holder = engine.drafter.followers[seq].holder
        assert len(holder.blocks) == engine.runner.blocks.blocks_for(holder.num_cached), "guessed rows are gone"
        fresh.drafter.release(again)
        fresh.runner.blocks.release(again)
    assert level_metrics(engine.drafter) == []


def test_tokens_taken_back(easy):
    """After `rewind`, near or far back, the head guesses as if the removed tokens had never been there."""
    for back in (1, 5, 30, 90):
        engine, fresh = engine_of(easy, prefill_rows=8), engine_of(easy)
        seq = Sequence(0, random_prompts(2, seed=9, longest=90)[1], SamplingParams(max_tokens=200), 9)
        rounds(engine, seq, 12)
        length = max(3, len(seq) - back)
        engine.drafter.rewind(seq, length)
        other = [(t + 7) % 290 + 1 for t in seq.token_ids[length:]][:4]
        seq.token_ids[length:] = other
        engine.runner.truncate(seq, length - 1)
        rounds(engine, seq, 1, k=0)
        again = read_anew(fresh, seq)
        mine, its = engine.drafter.propose([seq], [12]), fresh.drafter.propose([again], [12])
        assert mine.count(0) == 12
        if back < 64:  # further back, hidden states are gone: the head starts anew
            assert mine.nodes(0) == its.nodes(0)


def test_below_a_cascade(folders, easy):
    """The head drafts for a cascade's middle model; when the target rejects that model's tokens, it is rewound."""
    middle = replace(load_pair(folders / "target", folders / "target"), head=easy.head)
    write_model(folders / "top", noise=0.05)
    silence(folders / "top", 1.0)
    top = load_pair(folders / "top", folders / "target")
    pair = replace(top, draft=middle.target, head=load_head(folders / "eagle", middle.target, ops.resolve()))
    below = SpecConfig("eagle", num_draft_tokens=8)
    for asked in (GREEDY, DRAWN):
        plain = texts(run(engine_of(pair, 0), PROMPTS, asked))
        engine = make_engine(pair, "cascade", k=8, below=(below,))
        assert texts(run(engine, PROMPTS, asked)) == plain
        assert engine.metrics.num_rollbacks > 5
        (name, level), *rest = level_metrics(engine.drafter)
        assert (name, rest) == ("level 1: eagle", [])
        assert level.mean_acceptance_length > 1.4


def test_a_prefix_that_nobody_showed(easy):
    """The head's context begins where hidden states begin, again after a gap; the head still drafts."""
    drafter, seq, hidden = engine_of(easy).drafter, Sequence(0, list(range(1, 40)), GREEDY, 0), torch.randn(40, 32)
    assert drafter.propose([seq], [6]).count(0) == 0
    for shown, start, drafted in (((20, 30), 20, 0), ((35, 38), 35, 6), ((0, 38), 0, 6)):  # the first ends too early
        drafter.observe([seq], [Span(*shown)], hidden[slice(*shown)])
        assert drafter.propose([seq], [6]).count(0) == drafted
        context = drafter.followers[seq]
        assert (context.start, context.num_cached) == (start, shown[1] - start if drafted else 0)


def test_beyond_its_own_context(folders, easy, tmp_path, spied):
    knowing_head(tmp_path, folders / "target", "eagle", max_position_embeddings=32)
    pair = with_head(easy, tmp_path)
    asked = replace(GREEDY, max_tokens=60)
    plain = texts(run(engine_of(pair, 0), PROMPTS, asked))
    assert engine_of(pair, 6, window=8).drafter.runner.window == 8
    engine = engine_of(pair, 6, beyond="slide")
    runner = engine.drafter.runner
    assert runner.window == 32
    runner.grow = lambda *_: None  # level by level, to be watched
    ends = spied(runner, "expand", lambda levels, _: [x.holder.num_cached + x.masks[0].bit_count() for x in levels])
    done = run(engine, PROMPTS, asked)
    assert texts(done) == plain and max(map(max, ends)) > 61
    assert not any("draft context" in c.metrics.spec.undrafted for c in done)
    stopping = engine_of(pair, 6, beyond="stop")
    run(stopping, PROMPTS, asked)
    assert engine.metrics.num_accepted_tokens > 2 * stopping.metrics.num_accepted_tokens > 0


def test_a_head_in_another_format(folders, easy):
    spec = SpecConfig("eagle", str(folders / "eagle"), "w4a8,lm_head=w8a8", num_draft_tokens=8)
    engine = build_engine(str(folders / "target"), EngineConfig(spec=spec, max_num_seqs=4))
    assert engine.drafter.runner.cache.num_blocks == engine.runner.cache.num_blocks
    assert len(engine.drafter.runner.cache.layers) == 1
    assert texts(run(engine, PROMPTS, GREEDY)) == texts(run(engine_of(easy, 0), PROMPTS, GREEDY))
    assert engine.metrics.num_accepted_tokens > 30


def test_heads_that_do_not_fit_are_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match="needs a draft head of this target"):
        build_engine(str(folders / "target"), EngineConfig(spec=SpecConfig("eagle")))
    target, draft, head = (str(folders / name) for name in ("target", "draft", "eagle"))
    with pytest.raises(ConfigError, match="--draft"):
        build_engine(target, EngineConfig(spec=SpecConfig("eagle", draft)))
    with pytest.raises(ConfigError, match="--draft"):
        build_engine(target, EngineConfig(spec=parse_draft(f"ngram > {head}")))
    with pytest.raises(ConfigError, match="name its target"):
        build_engine(head, EngineConfig())
    raw = raw_config("eagle3", MODEL_VOCAB, [1, 2, 9])
    write_head(tmp_path, raw, random_head(parse_head_config(raw)))
    with pytest.raises(ConfigError, match="of the target's 2"):
        build_engine(target, EngineConfig(spec=SpecConfig("eagle", str(tmp_path))))
