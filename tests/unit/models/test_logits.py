"""Every model of the family gives the logits of `transformers`, whatever the layout of its files."""

import pytest
import torch
from fixtures_models import VARIANTS, all_logits, backends, load, oracle_logits, prompt, write_checkpoint

from sameseed import ops
from sameseed.models.config import parse_config
from sameseed.models.loader import load_model, read_config

TOLERANCE = 1e-4  # largest difference of float32 logits of size 2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(folder / name, variant) for name, variant in VARIANTS.items()}


@pytest.fixture(scope="module")
def expected(checkpoints):
    """The oracle's logits of each variant's prompt, computed once for all backends."""
    return {name: oracle_logits(checkpoints[name], prompt(v.length)) for name, v in VARIANTS.items()}


def difference(got, wanted):
    assert got.shape == wanted.shape
    return (got - wanted).abs().max().item()


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name, backend, checkpoints, expected):
    wanted = expected[name]
    assert wanted.std() > 0.5  # otherwise the tolerance would mean nothing
    got = all_logits(load(checkpoints[name], backend), prompt(VARIANTS[name].length))
    assert difference(got, wanted) < TOLERANCE


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.without is not None])
def test_logits_differ_without_what_makes_the_variant(name, checkpoints, expected):
    """The comparison above is sensitive to the window, the scaled rotation, the biases and the norms."""
    model = load(checkpoints[name])
    VARIANTS[name].without(model)
    assert difference(all_logits(model, prompt(VARIANTS[name].length)), expected[name]) > 0.05


@pytest.mark.parametrize("backend", backends())
def test_longrope_goes_by_the_engines_context(backend, checkpoints):
    """Up to the original length transformers takes the short factors, and a model for so many tokens does."""
    model = load_model(checkpoints["phi4-mini"], ops.resolve(backend), max_model_len=64)
    wanted = oracle_logits(checkpoints["phi4-mini"], prompt(64))
    assert difference(all_logits(model, prompt(64)), wanted) < TOLERANCE
    assert difference(all_logits(load(checkpoints["phi4-mini"], backend), prompt(64)), wanted) > 0.05


def test_what_transformers_saves_can_be_read(tmp_path):
    """With transformers' own spelling of config.json and its own shards."""
    transformers = pytest.importorskip("transformers")
    raw = VARIANTS["qwen3"].raw
    config = transformers.Qwen3Config(**{n: v for n, v in raw.items() if n not in ("architectures", "model_type")})
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert difference(all_logits(load(tmp_path), prompt(12)), oracle_logits(tmp_path, prompt(12))) < TOLERANCE


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_checkpoints(dtype, backend, tmp_path):
    """Weights keep the checkpoint's type, activations are float32; the oracle computes with widened weights."""
    folder = write_checkpoint(tmp_path, VARIANTS["llama3.2"], dtype=dtype)
    model = load(folder, backend)
    assert model.weights.layers[0].qkv.parts["weight"].dtype == dtype
    assert difference(all_logits(model, prompt(40)), oracle_logits(folder, prompt(40))) < TOLERANCE


@pytest.mark.parametrize("name", ["llama3", "llama3.1", "llama-linear"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_older_and_newer_spelling_of_rope_read_alike(name, key):
    newer = VARIANTS[name].raw
    rope = newer["rope_parameters"]
    older = {k: v for k, v in newer.items() if k != "rope_parameters"} | {"rope_theta": rope["rope_theta"]}
    scaling = {key if k == "rope_type" else k: v for k, v in rope.items() if k != "rope_theta"}
    older["rope_scaling"] = None if scaling[key] == "default" else scaling
    assert parse_config(older) == parse_config(newer)


def test_a_pass_reads_one_row_a_token_of_the_inputs_of_layers(checkpoints):
    for name, folder in checkpoints.items():
        assert (read_config(folder).read_share(1) < 1) == (name == "gemma4-e"), name
