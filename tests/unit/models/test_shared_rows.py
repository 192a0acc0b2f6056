"""Schemes whose rows share something (blocks, an offset, a choice): each matrix is encoded whole and by itself."""

import pytest
import torch
from fixtures_models import VARIANTS, Stored, all_logits, backends, prompt, random_tensors

from sameseed import ops, scheme
from sameseed.models import weights
from sameseed.models.config import parse_config
from sameseed.models.llama import Llama
from sameseed.models.weights import read_weights
from sameseed.scheme import QuantScheme, QuantTensor

pytestmark = pytest.mark.bits

RAW = {**VARIANTS["llama3"].raw, "hidden_size": 64, "intermediate_size": 320, "head_dim": 16, "num_hidden_layers": 1}
AT = "model.layers.0"
SHARED = ["fp8-b128", "fp8-a8-b128", "nf4-dq", "fp8-auto", "qoq", "w4a8-qoq", "mxfp4", "fp8-a8"]


def values(chosen, w):
    """The decoded values of a stack of matrices, float32."""
    parts = [chosen.unpack(p) for p in (w if isinstance(w, tuple) else (w,))]
    return torch.cat([scheme.get(p.format).decode(p) for p in parts])


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("backend", backends())
def test_a_loaded_matrix_is_the_one_encoded_alone(name, backend, monkeypatch):
    """A matrix equals the one in a checkpoint, whatever it is stacked with and however other matrices are chunked."""
    monkeypatch.setattr(weights, "CHUNK", 64 * 64)
    config, asked, chosen = parse_config(RAW), QuantScheme.parse(name), ops.resolve(backend)
    source = Stored(random_tensors(config), {})
    layer = read_weights(config, source, asked, chosen).layers[0]
    for stack, modules in ((layer.qkv, "qkv"), (layer.gate_up, ("gate", "up")), (layer.down, ("down",))):
        block = "self_attn" if modules == "qkv" else "mlp"
        wanted = [asked.encode(source.tensors[f"{AT}.{block}.{m}_proj.weight"]) for m in modules]
        assert values(chosen, stack).equal(torch.cat([scheme.get(q.format).decode(q) for q in wanted]))


@pytest.mark.parametrize("backend", backends())
def test_a_choice_is_made_for_each_matrix(backend):
    """One matrix of a stack has a wide range and takes e5m2, the others e4m3; their products are joined."""
    config, chosen = parse_config(RAW), ops.resolve(backend)
    tensors = random_tensors(config)
    wide = tensors[f"{AT}.mlp.up_proj.weight"]
    wide *= 1e-7
    wide[:, 3] = 1.0
    source = Stored(tensors, {})
    model = Llama(config, read_weights(config, source, QuantScheme.parse("fp8-auto"), chosen), chosen)
    layer = model.weights.layers[0]
    assert isinstance(layer.gate_up, tuple) and [w.format for w in layer.gate_up] == ["fp8_e4m3", "fp8_e5m2"]
    assert isinstance(layer.qkv, QuantTensor) and layer.qkv.format == "fp8_e4m3"
    assert all_logits(model, prompt(5)).isfinite().all()


def test_stored_codes_of_a_variant_are_kept():
    """The format's name, with or without the variant, keeps the codes as they are; another format does not."""
    config, chosen = parse_config(RAW), ops.resolve("reference")
    stored = dict.fromkeys((f"{AT}.mlp.gate_proj", f"{AT}.mlp.up_proj"), "fp8-b128")
    for asked, kept in (("auto", True), ("fp8", True), ("fp8-b128", True), ("fp8-a8-b128", True), ("fp8_e5m2", False)):
        source = Stored(random_tensors(config), stored)
        layer = read_weights(config, source, QuantScheme.parse(asked), chosen).layers[0]
        assert bool(source.decoded) is not kept, asked
        assert layer.gate_up.activations == ("fp8" if "a8" in asked else None)
