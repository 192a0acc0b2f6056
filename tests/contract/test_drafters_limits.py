"""Every drafter with a model of its own, at its limits: the text stays, and drafts end where they cannot go on."""

from dataclasses import replace

import pytest
import torch
from lawkit import DRAFTERS, SAMPLED, make_engine, random_prompts, run, texts

from sameseed import registry
from sameseed.kvcache.blocks import BlockManager
from sameseed.models.block import BlockHead
from sameseed.models.eagle import EagleHead
from sameseed.models.llama import Llama
from sameseed.request import SamplingParams

NAMES = [n for n in DRAFTERS if registry.load("drafters", n).DRAFTER.owns in ("model", "head")]
pytestmark = pytest.mark.parametrize("name", NAMES)
PROMPTS = [*random_prompts(4, seed=4, longest=20), list(range(1, 60))]
ASKED = SamplingParams(max_tokens=40, seed=6, ignore_eos=True, **SAMPLED)
CONTEXT = 40  # of the drafter's model


def remade(model, config, weights):
    """A model or head with another configuration or other weights."""
    if isinstance(model, EagleHead):
        return EagleHead(config, weights, model.ops, model.target_eps, model.max_model_len)
    if isinstance(model, BlockHead):
        return BlockHead(config, weights, model.ops, 256)
    return Llama(config, weights, model.ops, min(model.max_model_len, config.max_model_len))


def short(model):
    if isinstance(model, Llama):
        return remade(model, replace(model.config, max_model_len=CONTEXT), model.weights)
    layer = replace(model.config.layer, max_model_len=CONTEXT)
    return remade(model, replace(model.config, layer=layer), model.weights)


def broken(model):
    """The model with logits that are no numbers."""
    parts = {"weight": torch.full_like(model.weights.lm_head.parts["weight"], torch.nan)}
    weights = replace(model.weights, lm_head=replace(model.weights.lm_head, parts=parts))
    return remade(model, model.config, weights)


def changed(pair, change):
    return replace(pair, draft=change(pair.draft), head=change(pair.head), block=change(pair.block))


@pytest.fixture
def plain(pair, name):
    return texts(run(make_engine(pair), PROMPTS, ASKED))


def test_a_context_shorter_than_the_text(pair, name):
    """The last prompt is longer than the drafter's context."""
    options = {"beyond": "stop"} if "beyond" in options_of(name) else {}
    asked = replace(ASKED, max_tokens=60)
    done = run(make_engine(changed(pair, short), name, k=4, options=options), PROMPTS, asked)
    assert texts(done) == texts(run(make_engine(pair), PROMPTS, asked))
    first, last = (c.metrics.spec for c in (done[0], done[-1]))
    assert first.num_draft_tokens > 0 and 0 < first.undrafted["draft context"] < first.num_rounds
    assert last.num_draft_tokens == 0 and last.undrafted["draft context"] > 30


def options_of(name):
    return set(registry.load("drafters", name).DRAFTER.Options.__dataclass_fields__)


@pytest.mark.parametrize("num_blocks", [1, 6])
def test_few_blocks(pair, name, num_blocks, plain):
    """Sequences that do not run give up their blocks; without a free one there is no draft."""
    full, few = (make_engine(pair, name, k=4, block=8) for _ in range(2))
    few.drafter.runner.blocks = BlockManager(num_blocks, 8)
    assert texts(run(few, PROMPTS, ASKED)) == texts(run(full, PROMPTS, ASKED)) == plain
    assert few.metrics.num_draft_tokens < full.metrics.num_draft_tokens
    assert num_blocks == 1 or few.metrics.num_draft_tokens > 0


def test_logits_that_are_no_numbers(pair, name, plain):
    engine = make_engine(changed(pair, broken), name, k=4)
    assert texts(run(engine, PROMPTS, ASKED)) == plain
    assert engine.metrics.num_draft_tokens == 0
