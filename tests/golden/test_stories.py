"""A published model, with its published continuation and loss, on every backend and in several weight formats."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from fixtures_models import SHARED, all_logits, backends, feed, load, make_runner, make_sequence, need, oracle_logits
from golden.stories import StoryTokenizer, convert, pairs_to_halves

pytestmark = pytest.mark.bits

MODELS = SHARED / "models"
PROMPT = [1, 403, 407, 261, 378]
CONTINUATION = [432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426]
LOSS, NUM_TOKENS = 1.430, 471
every_backend = pytest.mark.parametrize("backend", backends())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(need(MODELS / "stories260K.bin"), tmp_path_factory.mktemp("stories260K"))


@pytest.fixture(scope="module")
def tokenizer() -> StoryTokenizer:
    return StoryTokenizer(need(MODELS / "tok512.bin"))


@pytest.fixture(scope="module")
def story(tokenizer: StoryTokenizer) -> list[int]:
    with gzip.open(need(SHARED / "eval" / "tinystories-sample.txt.gz"), "rt", encoding="utf-8") as file:
        return tokenizer.encode(file.read(1000))


def mean_loss(logits: torch.Tensor, token_ids: list[int]) -> float:
    losses = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(token_ids[1:]), reduction="none")
    assert len(losses) == len(token_ids) - 1
    return losses.mean().item()


def greedy(folder: Path, backend: str, weights: str, kv_format: str, count: int) -> list[int]:
    runner = make_runner(load(folder, backend, weights), kv_format=kv_format)
    seq = make_sequence(PROMPT)
    for _ in range(count):
        seq.token_ids.append(int(feed(runner, seq, seq.num_pending)[0].argmax()))
    return seq.token_ids[len(PROMPT) :]


def test_tokenizer(tokenizer, story):
    assert len(tokenizer.pieces) == 512 and max(map(len, tokenizer.pieces[259:])) == 7
    assert tokenizer.encode("Once upon a time") == PROMPT
    assert (
        tokenizer.decode(CONTINUATION)
        == ", there was a little girl named Lily. "[: len(tokenizer.decode(CONTINUATION))]
    )
    assert len(story) == NUM_TOKENS
    assert tokenizer.decode(tokenizer.encode("🤖 é!")) == "🤖 é!"


def test_pairs_become_halves():
    """Two heads of 6 rows: the firsts of the pairs, then the seconds, for each head."""
    weight = torch.arange(12.0)[:, None].expand(12, 3)
    assert pairs_to_halves(weight, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@every_backend
@pytest.mark.parametrize(
    ("weights", "kv_format"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("int8", "int8")]
)
def test_greedy_continuation(weights, kv_format, backend, folder, tokenizer):
    """The published tokens; storing weights and KV cache in 16 or 8 bits does not change them."""
    got = greedy(folder, backend, weights, kv_format, len(CONTINUATION))
    assert got == CONTINUATION, tokenizer.decode(got)


@every_backend
@pytest.mark.parametrize(
    ("weights", "kv_format", "tolerance"), [("fp32", "fp32", 0.0005), ("bf16", "bf16", 0.005), ("int8", "int8", 0.02)]
)
def test_mean_loss(weights, kv_format, tolerance, backend, folder, story):
    """The published loss has three digits; the tolerance allows for rounding."""
    loss = mean_loss(all_logits(load(folder, backend, weights), story, kv_format), story)
    print(f"{backend} {weights} {kv_format}: {loss:.5f}")
    assert loss == pytest.approx(LOSS, abs=tolerance)


def test_transformers_agrees(folder, story):
    """The converted folder is a valid Hugging Face checkpoint, and the oracle's logits equal ours."""
    wanted = oracle_logits(folder, story)
    assert mean_loss(wanted, story) == pytest.approx(LOSS, abs=0.0005)
    assert (all_logits(load(folder), story) - wanted).abs().max() < 1e-4


def test_unpermuted_heads_are_wrong(folder, story):
    """The loss shows whether a converter forgets to reorder the rotated pairs."""
    model = load(folder)
    q_and_k = (8 + 4) * 8  # rows of wq and wk in the stacked weight
    for layer in model.weights.layers:
        weight = layer.qkv.parts["weight"]
        heads = weight[:q_and_k].view(-1, 2, 4, 64)  # per head: firsts, then seconds
        weight[:q_and_k] = heads.transpose(1, 2).reshape(q_and_k, 64).clone()
    assert mean_loss(all_logits(model, story[:100]), story[:100]) > LOSS + 0.3
