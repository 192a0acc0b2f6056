"""Block heads in training: they compute what the inference head computes, learn, and resume where they stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_training import assert_learned_and_counted, assert_resumed_equals_whole, run
from lawkit import MODEL_VOCAB, write_model

from sameseed import ops
from sameseed.config import SpecConfig
from sameseed.errors import ConfigError
from sameseed.kvcache.cache import KVCache
from sameseed.models.block import BlockHead
from sameseed.models.block_runner import BlockRunner
from sameseed.models.eagle_loader import load_head
from sameseed.models.head_config import BlockConfig
from sameseed.models.loader import load_model
from sameseed.request import SamplingParams, Sequence
from sameseed_train.block_model import BlockForTraining, choose_anchors
from sameseed_train.head_job import export_head
from sameseed_train.head_recipe import BlockSettings, HeadRecipe, LossSettings, SizeSettings, head_config
from sameseed_train.optim import OptimSettings
from sameseed_train.own import dense
from sameseed_train.recipe import TrainSettings
from sameseed_train.seeds import TextSettings
from sameseed_train.states import TextStates

MASK = MODEL_VOCAB - 1


@pytest.mark.parametrize(
    ("architecture", "draft_vocab", "rank"), [("LlamaForCausalLM", 0, 0), ("Qwen3ForCausalLM", 120, 6)]
)
def test_guesses_like_the_inference_head(tmp_path: Path, architecture: str, draft_vocab: int, rank: int) -> None:
    """Every block of a text, with or without a Markov head, has BlockRunner's logits for that anchor."""
    write_model(tmp_path / "target", num_hidden_layers=3, architectures=[architecture])
    target = load_model(tmp_path / "target", ops.resolve())
    settings = BlockSettings(num_layers=2, block_size=4, markov_rank=rank)
    recipe = HeadRecipe(kind="block", layers=(1, 3), size=SizeSettings(draft_vocab_size=draft_vocab), block=settings)
    config = head_config(recipe, target.config, MASK)
    assert isinstance(config, BlockConfig)
    generator = torch.Generator().manual_seed(5)
    head = BlockForTraining(config, 3)
    with torch.no_grad():
        for weight in head.parameters():  # random enough that every weight matters
            weight.mul_(8.0 if weight.ndim == 2 else 1.0).add_(0.1 * torch.randn(weight.shape, generator=generator))
    own = torch.randperm(MODEL_VOCAB, generator=generator)[:120].sort().values if draft_vocab else None
    export_head(head, own, tmp_path / "head", "float32")
    loaded = load_head(tmp_path / "head", target, target.ops)
    assert isinstance(loaded, BlockHead) and replace(loaded.config, layer=config.layer) == config
    width = target.config.hidden_size
    texts = [
        TextStates(torch.randint(1, MODEL_VOCAB, (n,), generator=generator), given, torch.randn(n - 1, 2 * width))
        for n, given in ((12, 3), (9, 5))
    ]
    anchors = [choose_anchors(text, 99, None) for text in texts]
    assert [a.tolist() for a in anchors] == [list(range(3, 11)), list(range(5, 8))]
    batch = head.batch(texts, [0, 1], anchors)
    lm_head = dense(target.ops, target.weights.lm_head) if own is None else head.lm_head.weight
    with torch.no_grad():
        out = head.outputs(batch, dense(target.ops, target.weights.embedding))
        rows = head.output_rows(out.flatten(0, 2), batch.tokens.flatten())
        learned = (rows @ head.output_weight(lm_head).T).view(*batch.tokens.shape, -1)
    c, compared = config.layer, 0
    for b, text in enumerate(texts):
        for k, anchor in enumerate(anchors[b].tolist()):
            runner = BlockRunner(loaded, KVCache(c.kv_shapes, 4, 16))
            holder = Sequence(0, (), SamplingParams(), 0)
            assert runner.blocks.reserve(holder, anchor + 4)
            runner.extend([holder], [[1] * anchor], [text.states[:anchor]], False)
            logits = runner.guess([holder], [int(text.ids[anchor])], [4])
            for g in range(4):
                assert bool(batch.counts[b, k, g]) == (anchor + g < len(text.states))
                if not batch.counts[b, k, g]:
                    continue
                before = text.ids[anchor + g : anchor + g + 1].int()
                assert int(batch.tokens[b, k, g]) == int(before)
                assert batch.last[batch.places[b, k, g]].equal(text.states[anchor + g, -width:])
                wanted = logits[g] + (loaded.bias(before)[0] if rank else 0.0)
                torch.testing.assert_close(learned[b, k, g], wanted, atol=3e-4, rtol=3e-4)
                compared += 1
    assert compared > 30


# --- whole runs ---


def recipe_for(folder: Path, **changes: Any) -> HeadRecipe:
    recipe = HeadRecipe(
        kind="block",
        target=str(folder / "target"),
        layers=(1, 3),
        batch=8,
        texts=TextSettings(num_texts=8, prompt_tokens=32, new_tokens=24, greedy=1.0),
        loss=LossSettings(candidates=200),
        block=BlockSettings(num_layers=2, block_size=5, markov_rank=16, anchors=12),
        train=TrainSettings(8, rows=4, row_tokens=64, warmup=2, decay=0.5, optim=OptimSettings(0.02, 0.004)),
    )
    return replace(recipe, **changes)


def test_learns_and_the_engine_accepts_as_counted(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_for(folder)
    made = run(folder, tmp_path / "out", replace(recipe, train=replace(recipe.train, steps=80)))
    spec = SpecConfig("block", str(made.folder), num_draft_tokens=4)
    assert_learned_and_counted(folder, tmp_path / "out", spec, 1)
    card = (made.folder / "README.md").read_text()
    assert "Block head" in card and "2 layers" in card


def test_resumed_run_equals_a_whole_one(folder: Path, tmp_path: Path) -> None:
    assert_resumed_equals_whole(folder, tmp_path, recipe_for(folder), 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "medusa"}, "kind must be eagle3 or block, got 'medusa'"),
        ({"block": BlockSettings(block_size=3)}, "blocks of 4 to 64 tokens"),
        ({"block": BlockSettings(anchors=0)}, "anchors must be at least 1"),
        ({"block": BlockSettings(mask_token=MODEL_VOCAB)}, f"mask_token {MODEL_VOCAB} is none of the target's"),
        ({"layers": (0, 2)}, "a block head any number"),
    ],
)
def test_recipes_that_cannot_be(folder: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(folder, tmp_path, recipe_for(folder, **changes))
