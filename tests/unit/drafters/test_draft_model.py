"""The draft_model drafter and its shadows: they follow the text, catch up, and keep to the target's vocabulary."""

from collections.abc import Callable, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
from lawkit import MODEL_VOCAB, SAMPLED, TOKENIZER_SIZE, Pair, make_engine, random_prompts, run, texts, write_model

from sameseed import ops, registry
from sameseed.config import EngineConfig, SpecConfig, parse_draft
from sameseed.drafters._choices import choices
from sameseed.engine.build import build_engine
from sameseed.engine.levels import resolve
from sameseed.errors import ConfigError
from sameseed.lengths.confidence import ConfidenceLength
from sameseed.models.llama import Llama
from sameseed.models.loader import load_model
from sameseed.request import SamplingParams, Sequence
from sameseed.scheme import QuantTensor
from sameseed.spec.draft import Draft

PROMPTS = random_prompts(5, seed=4)
ASKED = SamplingParams(max_tokens=40, seed=6, ignore_eos=True, **SAMPLED)


@dataclass(frozen=True)
class Judge(ConfidenceLength):
    """A policy that ends the chains if `says(paths)`."""

    says: Callable[[Seq[Seq[float]]], bool] = bool

    def ends(self, paths):
        return self.says(paths)


def with_draft(pair, folder, **config):
    """The same target with another draft."""
    write_model(folder, noise=0.04, **config)
    return Pair(pair.target, load_model(folder, ops.resolve()), pair.tokenizer)


@pytest.mark.parametrize("method", ["draft_model", "self_quant"])
def test_a_draft_equal_to_the_target_is_always_right(pair, method):
    """Coupled sampling: the same model with the same noise guesses every token, greedy or sampled."""
    twin = Pair(pair.target, pair.target, pair.tokenizer)
    for asked in (ASKED, SamplingParams(max_tokens=40, seed=6, ignore_eos=True, repetition_penalty=1.2)):
        engine = make_engine(twin, method, k=5)
        run(engine, PROMPTS, asked)
        assert engine.metrics.acceptance_rate == 1.0
        assert engine.metrics.num_rollbacks == 0


@pytest.mark.parametrize(
    ("folder", "method", "wrong", "remedy"),
    [
        ("draft", "draft_model", "block", "--draft"), ("draft", "draft_model", "parallel", "names no mask token"),
        ("head", "eagle", "block", "--draft eagle"), ("block", "block", "eagle", "--draft block"),
    ],
)  # fmt: skip
def test_a_folder_is_drafted_with_as_what_it_is(pair_folders, folder, method, wrong, remedy):
    target, model = str(pair_folders[0]), str(pair_folders[0].parent / folder)
    assert resolve(parse_draft(model)).spec.method == method
    engine = build_engine(target, EngineConfig(max_num_seqs=2, spec=parse_draft(model)))
    assert type(engine.drafter) is registry.load("drafters", method).DRAFTER
    with pytest.raises(ConfigError, match=remedy):
        build_engine(target, EngineConfig(max_num_seqs=2, spec=SpecConfig(wrong, model)))


@pytest.fixture
def engines_both_ways(pair, spied):
    """Makes two engines, whose chains grow in one native call and by a pass a token; and what the calls return."""

    def made(k, options):
        at_once, by_token = (make_engine(pair, "draft_model", k=k, options=options) for _ in range(2))
        by_token.drafter.runner.grow = lambda *_: None
        return at_once, by_token, spied(at_once.drafter.runner, "grow")

    return made


@pytest.mark.parametrize(("siblings", "limit", "threads"), [(0, 0, 1), (1, 0, 1), (2, 200, 1), (3, 0, 2)])
def test_chains_of_one_call_are_those_of_a_pass_a_token(engines_both_ways, siblings, limit, threads):
    """Chains of one native call equal those of one pass per token: tokens, siblings, confidences and cached rows.

    Cases: texts that end, truncated sampling, chains ended by the policy or by an unlikely token, the end of the
    context, and a vocabulary that ends at `limit`. There the native code computes the row before the forbidden token
    again in the next round.
    """
    flat = replace(ASKED, temperature=1.2, top_p=1.0)
    ending = replace(flat, ignore_eos=False, stop_token_ids=tuple(range(0, MODEL_VOCAB, 3)))
    cold = replace(flat, temperature=0.001)  # most siblings have the probability 0
    asked = [replace(ASKED, temperature=0.0), ASKED, replace(flat, top_k=5), replace(flat, min_p=0.05), ending, cold]
    wide, width = 1 + siblings, limit or TOKENIZER_SIZE
    at_once, by_token, calls = engines_both_ways(9 * wide, {"siblings": siblings})
    prompts = random_prompts(len(asked), seed=4, vocab_size=width)
    seqs = [Sequence(i, prompt, how, 50 + i) for i, (prompt, how) in enumerate(zip(prompts, asked, strict=True))]
    long = Sequence(9, tuple(random_prompts(1, seed=2, vocab_size=width)[0] * 60)[:253], asked[0], 1)
    rules = ((0.0, lambda paths: False), (0.0, lambda paths: sum(path[-1] for path in paths) < 1.0))
    for least, ends in (*rules, (0.3, lambda paths: False)):
        for given, k in (([*seqs, long], 9 * wide), (seqs, 1), (seqs[:1], 6 * wide), (seqs, 4 * wide + 1)):
            drafts = []
            for engine, count in ((at_once, threads), (by_token, 1)):
                engine.drafter.policy = engine.drafter.writer.policy = Judge(9, least, ends)
                engine.drafter.writer.vocab_limit = limit or MODEL_VOCAB
                with using(count):
                    drafts.append(engine.drafter.propose(given, [k] * len(given)))
            found, wanted = drafts
            assert [found.nodes(b) for b in range(len(given))] == [wanted.nodes(b) for b in range(len(given))]
            assert found.confidence is not None and wanted.confidence is not None
            np.testing.assert_allclose(found.confidence, wanted.confidence, rtol=1e-6)
            shadows = [
                [(s.token_ids, not limit and s.num_cached) for s in map(e.drafter.followers.__getitem__, given)]
                for e in (at_once, by_token)
            ]
            assert shadows[0] == shadows[1]
    assert len(calls) == 12 and None not in calls
    assert limit or {t for grown in calls for tokens, *_ in grown[4:5] for t in tokens} & {*ending.stop_token_ids}


@pytest.mark.parametrize("siblings", [0, 2])
@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_p": 1.0}, {"top_p": 0.9}], ids=str)
def test_chains_of_a_reduced_vocabulary_are_those_of_a_pass_a_token(engines_both_ways, siblings, changes):
    """In one native call where its choice takes the noise by token id: greedily, or sampled without truncation."""
    ids, asked = list(range(1, TOKENIZER_SIZE, 2)), replace(ASKED, **{"temperature": 1.2, **changes})
    at_once, by_token, calls = engines_both_ways(9, {"siblings": siblings, "vocabulary": str(ids)})
    seqs = [Sequence(i, prompt, asked, 50 + i) for i, prompt in enumerate(random_prompts(3, seed=4))]
    found, wanted = (engine.drafter.propose(seqs, [9] * 3) for engine in (at_once, by_token))
    assert [found.nodes(b) for b in range(3)] == [wanted.nodes(b) for b in range(3)]
    assert found.tokens.size and {*found.tokens.tolist()} <= {*ids}
    able = asked.greedy or (asked.top_p == 1.0 and not siblings)
    assert [grown is not None for grown in calls] == [True] * able


@contextmanager
def using(threads):
    before = ops.num_threads()
    ops.set_num_threads(threads)
    try:
        yield
    finally:
        ops.set_num_threads(before)


def test_siblings_join_the_chain_as_leaves(pair):
    """Siblings do not change the chain: they are the likeliest other tokens of its places, added as leaves."""
    draft = [
        make_engine(pair, "draft_model", k=9, options={"siblings": s}).drafter.propose(
            [Sequence(0, PROMPTS[0], ASKED, 6)], [3 * (1 + s)]
        )
        for s in (0, 2)
    ]
    (chain, _), (tokens, parents) = (d.nodes(0) for d in draft)
    assert tokens[: len(chain)] == chain and parents[: len(chain)] == [-1, 0, 1]
    leaves = list(zip(parents, tokens, strict=True))[len(chain) :]
    assert leaves and len(set(leaves)) == len(leaves) <= 6
    assert all(token != chain[parent + 1] for parent, token in leaves)
    assert draft[1].confidence is not None and (draft[1].confidence > 0).all()


@pytest.mark.parametrize("prefill_rows", [1, 7, 512])
def test_catching_up_in_passes_of_bounded_size(pair, spied, prefill_rows):
    plain = texts(run(make_engine(pair), PROMPTS, ASKED))
    engine = make_engine(pair, "draft_model", options={"prefill_rows": prefill_rows})
    sizes = spied(engine.drafter.runner, "forward", lambda seqs, draft, rows, *a, **b: (sum(rows), len(seqs)))
    assert texts(run(engine, PROMPTS, ASKED)) == plain
    assert all(rows <= max(prefill_rows, 2 * count, 2 * len(PROMPTS)) for rows, count in sizes)
    assert engine.metrics.acceptance_rate > 0.3, "a draft that lost track would be mostly wrong"


def favouring(model, token):
    """The model with one LM head row enlarged along the mean direction of other rows: `token` often wins."""
    head = model.weights.lm_head
    weight = head.parts["weight"].clone()
    weight[token] = weight[:20].sum(0) * 3
    weights = replace(model.weights, lm_head=QuantTensor(head.format, head.shape, {"weight": weight}))
    return Llama(model.config, weights, model.ops, model.max_model_len)


def test_padding_of_the_draft_is_never_proposed(pair, tmp_path, spied):
    """The draft's LM head has more rows than the target's; choosing one of the surplus rows ends the chain."""
    wide = with_draft(pair, tmp_path / "wide", vocab_size=MODEL_VOCAB + 64)
    wide = Pair(wide.target, favouring(wide.draft, MODEL_VOCAB + 5), wide.tokenizer)
    engine = make_engine(wide, "draft_model", k=4)
    assert engine.drafter.followers.vocab_limit == MODEL_VOCAB
    drafts = spied(engine.drafter, "propose")
    done = run(engine, PROMPTS, ASKED)
    assert texts(done) == texts(run(make_engine(pair), PROMPTS, ASKED))
    seen = [token for draft in drafts for token in draft.tokens.tolist()]
    assert max(seen, default=0) < MODEL_VOCAB
    asked = sum(c.metrics.spec.num_rounds for c in done) * 4
    assert len(seen) < asked // 2, "the favourite did cut most drafts short"


def test_tokens_that_the_draft_does_not_have(pair, tmp_path):
    """The target's vocabulary is padded further than the draft's: a text with a token in between is not drafted."""
    narrow = with_draft(pair, tmp_path / "narrow", vocab_size=300)
    asked = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, logit_bias={302: 4.0}, temperature=1.0)
    plain = run(make_engine(pair), PROMPTS, asked)
    assert any(302 in c.token_ids for c in plain)
    engine = make_engine(narrow, "draft_model", k=4)
    assert engine.drafter.followers.vocab_limit == 300
    assert texts(run(engine, PROMPTS, asked)) == texts(plain)
    assert engine.metrics.num_draft_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_confidence_is_how_likely_the_target_agrees(pair, temperature):
    """Confidence is the draft's probability if greedy, else the token's share of exp(log p + noise) as in `choices`."""
    engine = make_engine(pair, "draft_model", k=3, confidence=0.0)
    drafter = engine.drafter
    seq = Sequence(0, [5, 6, 7], SamplingParams(temperature=temperature), 11)
    draft = drafter.propose([seq], [3])
    check = Sequence(1, [5, 6, 7, *draft.tokens.tolist()], SamplingParams(), 0)
    runner = drafter.runner
    runner.blocks.reserve(check, 6)
    out = runner.forward([check], Draft.trees([([], [])]), [3])  # only the prompt's rows are computed
    assert out.logits.shape[0] == 0, "no logits while tokens are pending"
    check = Sequence(2, [5, 6, 7], SamplingParams(), 0)
    runner.blocks.reserve(check, 6)
    out = runner.forward([check], draft, [3])
    tokens, rows = draft.tokens.tolist(), out.logits.cpu()
    if temperature:
        wanted = [choices(rows[i].numpy(), seq, tokens[:i], (), 1)[0][1] for i in range(3)]
    else:
        wanted = [float(rows[i].softmax(-1)[t]) for i, t in enumerate(tokens)]
    assert draft.confidence.tolist() == pytest.approx(np.cumprod(wanted), rel=1e-5)
