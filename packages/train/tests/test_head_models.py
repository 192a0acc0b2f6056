"""A head in training computes what the inference head computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lawkit import MODEL_VOCAB, write_model

from sameseed import ops
from sameseed.kvcache.cache import KVCache
from sameseed.models.eagle import HeadRunner, TreeLevel
from sameseed.models.eagle_loader import load_head
from sameseed.models.llama import Llama
from sameseed.models.loader import load_model
from sameseed.request import SamplingParams, Sequence
from sameseed_train.head import export_head
from sameseed_train.head_model import DraftRows, HeadForTraining
from sameseed_train.learning import dense
from sameseed_train.recipe import HeadRecipe, SizeSettings, head_config

AUX = (1, 2, 3)
STEPS = 4


def loud(head: HeadForTraining) -> torch.Generator:
    """Make the weights so large that every one matters."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.parameters():
            weight.mul_(8.0 if weight.ndim == 2 else 1.0).add_(0.1 * torch.randn(weight.shape, generator=generator))
    return generator


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = tmp_path_factory.mktemp("head") / "target"
    write_model(folder, num_hidden_layers=3)
    return load_model(folder, ops.resolve())


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 120}, {"num_kv_heads": 4, "intermediate_size": 72}])
def test_rows_draft_like_the_inference_head(target: Llama, tmp_path: Path, changes: dict[str, int]) -> None:
    """From every row of a text, each step along the text's own tokens has HeadRunner's logits for that chain."""
    config = head_config(HeadRecipe(layers=AUX, size=SizeSettings(**changes)), target.config)
    head = HeadForTraining(config, 3)
    generator = loud(head)
    own = (
        torch.randperm(MODEL_VOCAB, generator=generator)[:120].sort().values if "draft_vocab_size" in changes else None
    )
    export_head(head, own, tmp_path / "head", "float32")
    loaded = load_head(tmp_path / "head", target, target.ops)
    lengths = [12, 9]
    tokens = torch.randint(1, MODEL_VOCAB, (2, 12), generator=generator)
    states = torch.randn(2, 12, 3 * target.config.hidden_size, generator=generator)
    rows = DraftRows.of(torch.tensor(lengths), torch.tensor([0, 4]), STEPS, 12)
    weight = dense(target.ops, target.weights.lm_head) if own is None else head.lm_head.weight
    with torch.no_grad():
        outputs = head(dense(target.ops, target.weights.embedding)[tokens], states, rows, STEPS)
        learned = [out @ weight.T for out in outputs]
    at = {int(place): i for i, place in enumerate(rows.index)}
    assert [divmod(int(p), 12) for p in rows.index[rows.counts]] == [
        *((0, t) for t in range(12)),
        *((1, t) for t in range(4, 9)),
    ]
    for b, length in enumerate(lengths):
        for base in range(2, length - STEPS + 1):
            guesses = chain(loaded, tokens[b], states[b], base)
            for step, logits in enumerate(guesses):
                row = at.get(b * 12 + base + step)
                if row is not None and rows.counts[row]:
                    torch.testing.assert_close(learned[step][row], logits, atol=2e-4, rtol=2e-4)


def chain(loaded: object, tokens: torch.Tensor, states: torch.Tensor, base: int) -> list[torch.Tensor]:
    """Logits [Vd] of STEPS guesses: after rows 0..base with the target's states, then along the text."""
    c = loaded.config.layer  # type: ignore[attr-defined]
    runner = HeadRunner(loaded, KVCache(c.kv_shapes, 4, 16))  # type: ignore[arg-type]
    holder = Sequence(0, (), SamplingParams(), 0)
    assert runner.blocks.reserve(holder, base + 1 + STEPS)
    logits, feature, _ = runner.extend([holder], [tokens[: base + 1].tolist()], [states[: base + 1]], True)
    found = [logits[0]]
    for step in range(1, STEPS):
        level = TreeLevel(holder, [int(tokens[base + step])], [(1 << step) - 1], step - 1)
        logits, feature = runner.expand([level], feature)
        found.append(logits[0])
    return found
