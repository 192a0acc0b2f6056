"""Heads in training: they compute what the inference head computes, learn, and go on where they stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lawkit import MODEL_VOCAB, write_model

from foretoken import ops
from foretoken.kvcache.cache import KVCache
from foretoken.models.eagle_loader import load_head
from foretoken.models.eagle_runner import HeadRunner, Level
from foretoken.models.llama import Llama
from foretoken.models.loader import load_model
from foretoken.request import SamplingParams, Sequence
from foretoken.train.head_export import export_head
from foretoken.train.head_job import dense
from foretoken.train.head_model import HeadForTraining, HeadShape, Rows

AUX = (1, 2, 3)
STEPS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = tmp_path_factory.mktemp("head") / "target"
    write_model(folder, num_hidden_layers=3)
    return load_model(folder, ops.resolve())


def shape_for(target: Llama, **changes: int) -> HeadShape:
    c = target.config
    shape = HeadShape(
        vocab_size=c.vocab_size,
        draft_vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        target_hidden=c.hidden_size,
        num_captures=3,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        rms_eps=c.rms_eps,
        rope=c.rope,
        max_positions=c.max_model_len,
    )
    return replace(shape, **changes)


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 120}, {"num_kv_heads": 4, "intermediate_size": 72}])
def test_guesses_like_the_inference_head(target: Llama, tmp_path: Path, changes: dict[str, int]) -> None:
    """From every row of a text, each step along the text's own tokens: HeadRunner's logits for that chain."""
    head = HeadForTraining(shape_for(target, **changes), 3)
    with torch.no_grad():
        for parameter in head.parameters():  # chance enough that every weight matters
            parameter.mul_(8.0 if parameter.ndim == 2 else 1.0).add_(0.1 * torch.randn_like(parameter))
    generator = torch.Generator().manual_seed(5)
    own = (
        torch.randperm(MODEL_VOCAB, generator=generator)[:120].sort().values if "draft_vocab_size" in changes else None
    )
    export_head(head, AUX, own, tmp_path / "head", "float32")
    loaded = load_head(tmp_path / "head", target, target.ops)
    lengths = [12, 9]
    tokens = torch.randint(1, MODEL_VOCAB, (2, 12), generator=generator)
    states = torch.randn(2, 12, 3 * target.config.hidden_size, generator=generator)
    rows = Rows.of(torch.tensor(lengths), torch.tensor([0, 4]), STEPS, 12)
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
    """Logits [Vd] of STEPS guesses, the first after rows 0..base with the target's states, the others along the text."""
    c = loaded.config.layer  # type: ignore[attr-defined]
    runner = HeadRunner(loaded, KVCache(1, 4, 16, c.num_kv_heads, c.head_dim))  # type: ignore[arg-type]
    holder = Sequence(0, (), SamplingParams(), 0)
    assert runner.blocks.reserve(holder, base + 1 + STEPS)
    logits, feature = runner.extend([holder], [tokens[: base + 1].tolist()], [states[: base + 1]], True)
    found = [logits[0]]
    for step in range(1, STEPS):
        level = Level(holder, [int(tokens[base + step])], [(1 << step) - 1], [step - 1])
        logits, feature = runner.expand([level], feature)
        found.append(logits[0])
    return found
