"""Models whose modules are stored in different formats or share rows, and random models made without files."""

import pytest
import torch
from fixtures_models import VARIANTS, Stored, all_logits, backends, prompt, random_tensors

from sameseed import ops, scheme
from sameseed.errors import ConfigError, RegistryError
from sameseed.models import weights
from sameseed.models.config import parse_config
from sameseed.models.llama import Llama
from sameseed.models.synthetic import RandomCheckpoint, random_model
from sameseed.models.weights import expected_shapes, read_weights
from sameseed.scheme import QuantScheme, QuantTensor

RAW = {**VARIANTS["qwen2"].raw, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}


def load(raw, schemes, asked, backend):
    config = parse_config(raw)
    source = Stored(random_tensors(config), schemes)
    chosen = ops.resolve(backend)
    return Llama(config, read_weights(config, source, QuantScheme.parse(asked), chosen), chosen), source


def textbook(raw, schemes, backend):
    """The same model, with every quantized matrix decoded to float32 first."""
    config = parse_config(raw)
    tensors = random_tensors(config)
    for module, text in schemes.items():
        q = QuantScheme.parse(text).encode(tensors[f"{module}.weight"])
        tensors[f"{module}.weight"] = scheme.get(q.format).decode(q)
    chosen = ops.resolve(backend)
    source = Stored(tensors, {})
    return Llama(config, read_weights(config, source, QuantScheme.parse("fp32"), chosen), chosen)


AT = "model.layers.0"
MIXED = {
    f"{AT}.self_attn.q_proj": "w4a16-g32", f"{AT}.self_attn.k_proj": "w4a16-g32", f"{AT}.self_attn.v_proj": "w8a16",
    f"{AT}.mlp.up_proj": "nf4", f"{AT}.mlp.down_proj": "fp8", "lm_head": "w8a16-g32",
}  # fmt: skip


@pytest.mark.parametrize("backend", backends())
def test_a_mixed_checkpoint_keeps_its_codes_and_computes_what_they_mean(backend):
    model, source = load(RAW, MIXED, "auto", backend)
    layer = model.weights.layers[0]
    assert [(w.format, w.shape[0]) for w in layer.qkv] == [("int4", 96), ("int8", 32)]
    assert [w.format for w in layer.gate_up] == ["fp32", "nf4"]
    assert (layer.down.format, model.weights.lm_head.format, layer.o.format) == ("fp8_e4m3", "int8", "fp32")
    assert not source.decoded
    wanted = all_logits(textbook(RAW, MIXED, backend), prompt(9))
    torch.testing.assert_close(all_logits(model, prompt(9)), wanted, rtol=1e-4, atol=1e-4)
    assert len(model.weights.matrices) == 2 * 4 + 2 + 2


def test_rules_choose_by_name_and_the_first_that_fits_counts():
    quant = QuantScheme.parse("w4a8-g32, lm_head=bf16, model.layers.0.*=w8a8, *.down_proj=nf4")
    assert quant.at("lm_head") == QuantScheme.parse("bf16")
    assert quant.at("model.layers.0.mlp.down_proj") == QuantScheme.parse("w8a8")
    assert quant.at("model.layers.1.mlp.down_proj") == QuantScheme.parse("nf4")
    assert quant.at("model.layers.1.mlp.up_proj") == QuantScheme.parse("w4a8-g32")
    assert QuantScheme.parse(str(quant)) == quant
    model, _ = load(RAW, {}, str(quant), "reference")
    formats = [w.format for w in model.weights.matrices]
    assert formats == ["int4"] + ["int8"] * 4 + ["int4", "int4", "int4", "nf4"] + ["bf16"]


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens", "*embed*"])
def test_with_tied_embeddings_either_name_hits_the_one_matrix(module):
    raw = {**RAW, "tie_word_embeddings": True}
    model, _ = load(raw, {}, f"w4a8-g32,{module}=bf16", "reference")
    assert model.weights.lm_head is model.weights.embedding
    assert model.weights.embedding.format == "bf16"


def test_another_scheme_decodes_what_is_stored():
    model, source = load(RAW, MIXED, "w8a8", "reference")
    assert {w.format for w in model.weights.matrices} == {"int8"}
    as_asked = {m for m, text in MIXED.items() if text.startswith("w8")}
    assert set(source.decoded) == {f"{m}.weight" for m in MIXED.keys() - as_asked}


@pytest.mark.parametrize("backend", backends())
def test_auto_a8_gives_int8_activations_to_what_can_take_them(backend):
    model, _ = load(RAW, MIXED, "auto-a8", backend)
    assert [w.activations for w in model.weights.layers[0].qkv] == ["int8", "int8"]
    assert [w.activations for w in model.weights.layers[0].gate_up] == [None, None]
    stored, _ = load(RAW, MIXED, "auto", backend)
    a, b = all_logits(model, prompt(9)), all_logits(stored, prompt(9))
    assert not a.equal(b)
    assert torch.nn.functional.cosine_similarity(a, b).min() > 0.99


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("w4a8,lm_head", ConfigError, "MODULES=FORMAT"), ("w4a8,=bf16", ConfigError, "MODULES=FORMAT"),
        ("w4a8,lm_head=bf17", RegistryError, "bf16"), ("w4a8,lm_haed=bf16", ConfigError, "lm_haed"),
    ],
)  # fmt: skip
def test_bad_rules(text, error, says):
    with pytest.raises(error, match=says):
        load(RAW, {}, text, "reference")


@pytest.mark.parametrize(
    ("stored", "asked", "kept", "activations"),
    [
        ("w4a16-g32-asym", "w4a8", True, "int8"), ("w4a16-g32-asym", "w4a16-g32", True, None),
        ("w4a16-g32-asym", "w4a16-g64", False, None), ("fp8-b128", "auto", True, None), ("fp8-b128", "fp8", True, None),
        ("fp8-b128", "fp8-b128", True, None), ("fp8-b128", "fp8-a8-b128", True, "fp8"),
        ("fp8-b128", "fp8_e5m2", False, None),
    ],
)  # fmt: skip
def test_the_name_of_the_stored_format_keeps_its_codes(stored, asked, kept, activations):
    """With or without the variant; another format does not."""
    every = [f"model.layers.{i}.mlp.{n}_proj" for i in range(2) for n in ("gate", "up", "down")]
    raw = {**RAW, "hidden_size": 64, "intermediate_size": 128}
    model, source = load(raw, dict.fromkeys(every, stored), asked, "reference")
    assert bool(source.decoded) is not kept
    down, scheme_ = model.weights.layers[1].down, QuantScheme.parse(stored if kept else asked)
    wanted = scheme_.encode(source.tensors["model.layers.1.mlp.down_proj.weight"])
    assert (down.format, down.group, down.parts.keys()) == (wanted.format, wanted.group, wanted.parts.keys())
    assert down.activations == activations


SHALLOW = VARIANTS["llama3"].raw | {"hidden_size": 64, "intermediate_size": 320, "head_dim": 16, "num_hidden_layers": 1}
# The rows of the first ones share something (blocks, an offset, a choice): each matrix is encoded whole and by itself.
FORMATS = ["fp8-b128", "fp8-a8-b128", "nf4-dq", "fp8-auto", "qoq", "w4a8-qoq", "mxfp4", "fp8-a8", "bf16", "w8a8"]
FORMATS += ["w8a16-g32", "w4a8", "w4a16-asym", "nf4", "fp8"]


def values(chosen, w):
    """The decoded values of a stack of matrices, float32."""
    parts = [chosen.unpack(p) for p in (w if isinstance(w, tuple) else (w,))]
    return torch.cat([scheme.get(p.format).decode(p) for p in parts])


@pytest.mark.bits
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", backends())
def test_a_loaded_matrix_is_the_one_encoded_alone(name, backend, monkeypatch):
    """A matrix equals the one in a checkpoint, whatever it is stacked with and however other matrices are chunked."""
    monkeypatch.setattr(weights, "CHUNK", 64 * 64)
    config, asked, chosen = parse_config(SHALLOW), QuantScheme.parse(name), ops.resolve(backend)
    source = Stored(random_tensors(config), {})
    layer = read_weights(config, source, asked, chosen).layers[0]
    assert all(t.is_contiguous() for w in layer.matrices for t in w.parts.values())
    for stack, modules in ((layer.qkv, "qkv"), (layer.gate_up, ("gate", "up")), (layer.down, ("down",))):
        block = "self_attn" if modules == "qkv" else "mlp"
        wanted = [asked.encode(source.tensors[f"{AT}.{block}.{m}_proj.weight"]) for m in modules]
        assert values(chosen, stack).equal(torch.cat([scheme.get(q.format).decode(q) for q in wanted]))


@pytest.mark.bits
@pytest.mark.parametrize("backend", backends())
def test_a_choice_is_made_for_each_matrix(backend):
    """One matrix of a stack has a wide range and takes e5m2, the others e4m3; their products are joined."""
    config, chosen = parse_config(SHALLOW), ops.resolve(backend)
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


CONFIG = parse_config(VARIANTS["qwen2"].raw)


def test_tensors_have_the_checkpoint_s_shapes():
    source = RandomCheckpoint(CONFIG)
    for name, shape in expected_shapes(CONFIG).items():
        value = source.tensor(name)
        assert value.shape == shape and value.dtype == source.dtype(name) == torch.bfloat16
        if len(shape) == 2:
            assert value[5:9].equal(source.rows(name, 5, 9))
            assert 0.8 < value.float().std() * shape[1] ** 0.5 < 1.2


def test_a_random_model_runs():
    for backend in ("reference", "auto"):
        model = random_model(CONFIG, ops.resolve(backend), QuantScheme.parse("w8a8"), 64)
        logits = all_logits(model, prompt(5))
        assert logits.shape == (5, 97) and logits.isfinite().all() and logits.std() > 0.1
    assert random_model(CONFIG, ops.resolve("reference")).weights.embedding.format == "bf16"
