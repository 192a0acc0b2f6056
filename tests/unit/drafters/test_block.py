"""The block drafter: one pass guesses from the target's hidden states; rejected guesses leave no trace in its cache."""

from dataclasses import dataclass, replace

import pytest
from fixtures_block import parsed, plain_block, raw_config, selected
from fixtures_eagle import random_head, target_states, write_head
from lawkit import MODEL_VOCAB, SAMPLED, Pair, make_engine, random_prompts, run, texts
from torch import Tensor

from sameseed.models.eagle_loader import load_head
from sameseed.request import SamplingParams, Sequence
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
    """Drafts of several rounds equal those of `by_hand`, whether the text took none or some of the last draft."""
    engine = make_engine(loud.pair, "block", k=5, block=4)
    seqs = [Sequence(i, p, [GREEDY, WARM][i % 2], 7 + i) for i, p in enumerate(PROMPTS[1:])]
    for seq in seqs:
        assert engine.runner.blocks.reserve(seq, 200)
    for taken in (0, 3, 0, 5, 0, 1, 0):
        decode_step(engine.runner, engine.drafter, seqs, [s.num_pending for s in seqs], [5] * len(seqs))
        again = engine.drafter.propose(seqs, [5] * len(seqs))
        assert [again.nodes(b)[0] for b in range(len(seqs))] == [by_hand(loud, seq, 5) for seq in seqs]
        for b, seq in enumerate(seqs):
            seq.token_ids += again.nodes(b)[0][:taken]


@pytest.mark.parametrize(
    "options", [{"prefill_rows": 1}, {"prefill_rows": 7, "siblings": 2}, {"vocabulary": "200"}], ids=str
)
def test_laws_with_every_option(pair, options):
    engine = make_engine(pair, "block", k=7, options=options)
    for asked in (ASKED, GREEDY):
        assert texts(run(engine, PROMPTS, asked)) == texts(run(make_engine(pair), PROMPTS, asked))
    assert engine.metrics.num_accepted_tokens > 0
