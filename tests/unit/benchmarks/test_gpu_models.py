"""Models of `make bench-gpu`: those made on a device equal those made on the CPU, and no tensor is left behind."""

from __future__ import annotations

import gpu_models
import pytest
import torch
from fixtures_device import Elsewhere, pretended_device

from sameseed import ops
from sameseed.models.config import parse_config
from sameseed.models.eagle_loader import load_head
from sameseed.models.loader import load_model
from sameseed.scheme import QuantScheme, QuantTensor
from sameseed.study import shapes
from sameseed.study.twin import make_head_twin, make_twin

TINY = shapes._raw("Llama", 640, 800, 11, (16, 8, 64), 4500, tie_word_embeddings=False, max_position_embeddings=2048,
                   rope_theta=1e4)  # fmt: skip


@pytest.fixture
def tiny_shape(monkeypatch):
    """A shape hardly larger than the embedded pair that it contains."""
    monkeypatch.setattr(gpu_models, "get_shape", lambda name: parse_config(TINY, where="the test's shape"))
    return "tiny"


def flat(x):
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, QuantTensor):
        return [t for _, t in sorted(x.parts.items())]
    if isinstance(x, tuple):
        return [t for y in x for t in flat(y)]
    return (
        [t for name in x.__dataclass_fields__ for t in flat(getattr(x, name))]
        if hasattr(x, "__dataclass_fields__")
        else []
    )


def test_twins_made_on_a_device_are_those_that_are_written(tiny_shape, tmp_path):
    reference, quant = ops.resolve("reference"), QuantScheme()
    shape = parse_config(TINY, where="the test's shape")
    live = make_twin(shape, gpu_models.TARGET, tmp_path / "target").layout.layers
    make_head_twin(shape, gpu_models.HEAD, gpu_models.TARGET, tmp_path / "head", num_tokens=4500)
    written = load_model(tmp_path / "target", reference, quant)
    head = load_head(tmp_path / "head", written, reference, quant)
    with pretended_device() as name:
        target = gpu_models.twin(gpu_models.TARGET, tiny_shape, quant, reference, name)
        made = gpu_models.head_twin(tiny_shape, target, quant, reference, name)
        pairs = [(target.weights.layers[i], written.weights.layers[i]) for i in live]
        pairs += [
            (target.weights.embedding, written.weights.embedding),
            (target.weights.lm_head, written.weights.lm_head),
        ]
        pairs += [(made.weights.layer, head.weights.layer), (made.weights.fc, head.weights.fc)]
        pairs += [(made.weights.lm_head, head.weights.lm_head)]
        for there, here in pairs:
            for a, b in zip(flat(there), flat(here), strict=True):
                assert isinstance(a, Elsewhere) and a.cpu().equal(b)
