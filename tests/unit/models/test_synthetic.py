"""Random models of any shape, made without files."""

from __future__ import annotations

import torch
from fixtures_models import VARIANTS, all_logits, prompt

from sameseed import ops
from sameseed.models.config import parse_config
from sameseed.models.synthetic import NOISE, RandomCheckpoint, random_model
from sameseed.models.weights import expected_shapes
from sameseed.scheme import QuantScheme

CONFIG = parse_config(VARIANTS["qwen2"].raw)


def test_tensors_have_the_checkpoint_s_shapes():
    source = RandomCheckpoint(CONFIG)
    for name, shape in expected_shapes(CONFIG).items():
        value = source.tensor(name)
        assert value.shape == shape and value.dtype == source.dtype(name) == torch.bfloat16
        if len(shape) == 2:
            assert value[5:9].equal(source.rows(name, 5, 9))
            assert 0.8 < value.float().std() * shape[1] ** 0.5 < 1.2


def test_rows_beyond_the_block_of_noise():
    """The block of noise is used again in another phase, so that no two rows are alike."""
    big = parse_config({**VARIANTS["llama2"].raw, "vocab_size": 3 * NOISE // 64, "hidden_size": 64})
    rows = RandomCheckpoint(big).rows("model.embed_tokens.weight", 0, 3 * NOISE // 64)
    assert rows.shape == (3 * NOISE // 64, 64)
    start = rows[:, :4].float()
    assert len(start[::7].unique(dim=0)) > 0.99 * len(start[::7])


def test_a_random_model_runs():
    for backend in ("reference", "auto"):
        model = random_model(CONFIG, ops.resolve(backend), QuantScheme.parse("w8a8"), 64)
        logits = all_logits(model, prompt(5))
        assert logits.shape == (5, 97) and logits.isfinite().all() and logits.std() > 0.1
    assert random_model(CONFIG, ops.resolve("reference")).weights.embedding.format == "bf16"
