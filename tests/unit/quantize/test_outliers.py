"""One channel is a hundred times the others: each outlier method must beat rounding to nearest by its factor."""

from __future__ import annotations

from functools import cache

import pytest
from fixtures_models import Stored
from fixtures_quantize import source_of, tokens, walk_of

from sameseed.models.config import ModelConfig
from sameseed.quantize._decoder import GATE, INPUT_NORM, POST_NORM, STAGES, K, Q, read_block

WIDTH, PLANTED = 128, 17
SETTINGS = {"hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}


def planted(compensated: bool) -> tuple[ModelConfig, Stored]:
    """A layer whose norms enlarge one channel; compensated: the weights that read it are smaller by the same factor."""
    config, source = source_of("llama2", **SETTINGS, num_key_value_heads=8)
    for norm, stage in ((INPUT_NORM, "qkv"), (POST_NORM, "gate_up")):
        source.tensors[f"model.layers.0.{norm}.weight"][PLANTED] *= 100
        if compensated:
            for name in STAGES[stage]:
                source.tensors[f"model.layers.0.{name}.weight"][:, PLANTED] /= 100
    return config, source


@cache
def output_error(method: str, scheme: str, compensated: bool) -> float:
    """The relative error of the outputs of q, k and gate, from the layer's own inputs."""
    config, source = planted(compensated)
    ids = tokens(config, rows=8, length=32)
    walk, plain = walk_of(config, source, method, scheme, ids), walk_of(config, source, "rtn", "fp32", ids)
    assert walk.hidden is not None and plain.hidden is not None
    original = read_block(config, source, 0)
    entering = walk.hidden.clone()
    block, _ = walk.layer(0)
    lost = whole = 0.0
    # v and up are left out: methods may rotate or scale their outputs, which o and down undo.
    for stage, names in (("qkv", (Q, K)), ("gate_up", (GATE,))):
        x, y = walk.decoder.inputs(block, stage, entering), plain.decoder.inputs(original, stage, plain.hidden)
        for name in names:
            expected = original.linears[name](y)
            lost += float((block.linears[name](x) - expected).square().sum())
            whole += float(expected.square().sum())
    return (lost / whole) ** 0.5


# method, scheme, whether the weights compensate the outlier, factor by which the error is below rounding's.
FACTORS = [
    ("smooth", "w8a8", True, 12.0),
    ("rotate", "w8a8", True, 12.0),
    ("awq", "w8a8", True, 12.0),
    ("smooth+gptq", "w8a8", True, 12.0),
    ("rotate+gptq", "w8a8", True, 12.0),
    ("gptq", "w4a16", False, 2.5),
    ("awq", "w4a16", False, 1.8),
    ("rotate", "w4a16", False, 1.8),
    ("awq+gptq", "w4a16", False, 2.0),
    ("rotate", "w4a8-qoq", True, 1.6),
    ("rotate+gptq", "w4a8-qoq", True, 2.0),
]


@pytest.mark.parametrize(("method", "scheme", "compensated", "factor"), FACTORS)
def test_an_outlier_method_beats_rounding(method: str, scheme: str, compensated: bool, factor: float) -> None:
    plain, found = output_error("rtn", scheme, compensated), output_error(method, scheme, compensated)
    assert found * factor < plain, f"{method} {found:.4f}, rtn {plain:.4f}: {plain / found:.2f} times"
