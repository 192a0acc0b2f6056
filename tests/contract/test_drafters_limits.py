"""Every drafter with a model of its own, at its limits: the text stays, and drafts end where they cannot go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lawkit import DRAFTERS, SAMPLED, Pair, make_engine, random_prompts, run, texts

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


def remade(model: Any, config: Any, weights: Any) -> Any:
    """A model or head with another configuration or other weights."""
    if isinstance(model, EagleHead):
        return EagleHead(config, weights, model.ops, model.target_eps, model.max_model_len)
    if isinstance(model, BlockHead):
        return BlockHead(config, weights, model.ops, 256)
    return Llama(config, weights, model.ops, min(model.max_model_len, config.max_model_len))


def short(model: Any) -> Any:
    if isinstance(model, Llama):
        return remade(model, replace(model.config, max_model_len=CONTEXT), model.weights)
    layer = replace(model.config.layer, max_model_len=CONTEXT)
    return remade(model, replace(model.config, layer=layer), model.weights)


def broken(model: Any) -> Any:
    """The model with logits that are no numbers."""
    parts = {"weight": torch.full_like(model.weights.lm_head.parts["weight"], torch.nan)}
    weights = replace(model.weights, lm_head=replace(model.weights.lm_head, parts=parts))
    return remade(model, model.config, weights)


def changed(pair: Pair, change: Callable[[Any], Any]) -> Pair:
    return replace(pair, draft=change(pair.draft), head=change(pair.head), block=change(pair.block))


@pytest.fixture
def plain(pair: Pair, name: str) -> list[tuple[int, ...]]:
    return texts(run(make_engine(pair), PROMPTS, ASKED))


def test_a_context_shorter_than_the_text(pair: Pair, name: str) -> None:
    """The last prompt is longer than the drafter's context."""
    options: dict[str, object] = {"beyond": "stop"} if "beyond" in options_of(name) else {}
    asked = replace(ASKED, max_tokens=60)
    done = run(make_engine(changed(pair, short), name, k=4, options=options), PROMPTS, asked)
    assert texts(done) == texts(run(make_engine(pair), PROMPTS, asked))
    first, last = (c.metrics.spec for c in (done[0], done[-1]))
    assert first.num_draft_tokens > 0 and 0 < first.undrafted["draft context"] < first.num_rounds
    assert last.num_draft_tokens == 0 and last.undrafted["draft context"] > 30


def options_of(name: str) -> set[str]:
    return set(registry.load("drafters", name).DRAFTER.Options.__dataclass_fields__)


@pytest.mark.parametrize("num_blocks", [1, 6])
def test_few_blocks(pair: Pair, name: str, num_blocks: int, plain: list[tuple[int, ...]]) -> None:
    """Sequences that do not run give up their blocks; without a free one there is no draft."""
    full, few = (make_engine(pair, name, k=4, block=8) for _ in range(2))
    few.drafter.runner.blocks = BlockManager(num_blocks, 8)  # type: ignore[attr-defined]
    assert texts(run(few, PROMPTS, ASKED)) == texts(run(full, PROMPTS, ASKED)) == plain
    assert few.metrics.num_draft_tokens < full.metrics.num_draft_tokens
    assert num_blocks == 1 or few.metrics.num_draft_tokens > 0


def test_logits_that_are_no_numbers(pair: Pair, name: str, plain: list[tuple[int, ...]]) -> None:
    engine = make_engine(changed(pair, broken), name, k=4)
    assert texts(run(engine, PROMPTS, ASKED)) == plain
    assert engine.metrics.num_draft_tokens == 0
