"""config.json: what is read, and errors that name the field."""

from __future__ import annotations

import json
import math

import pytest
import torch
from fixtures_models import BASE, LLAMA3_ROPE, VARIANTS

from sameseed.errors import ModelLoadError, SameseedError
from sameseed.models.config import ARCHITECTURES, ModelConfig, RopeConfig, parse_config
from sameseed.models.layers import inverse_frequencies, rope_table
from sameseed.models.loader import read_config

LLAMA = {"architectures": ["LlamaForCausalLM"], **BASE}


def changed(**values: object) -> dict[str, object]:
    return {**LLAMA, **values}


def refused(raw: dict[str, object], *words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse_config(raw, where="somewhere/config.json")
    assert isinstance(caught.value, SameseedError)
    for word in ("somewhere/config.json", *words):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_defaults_are_those_of_hugging_face():
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = parse_config({"architectures": ["LlamaForCausalLM"], **{k: BASE[k] for k in needed}})
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=97,
        hidden_size=48,
        intermediate_size=72,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=12,
        max_model_len=2048,
        rms_eps=1e-6,
        rope=RopeConfig(original_max_len=2048),
        tied_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None, None, None),
        eos_token_ids=(),
        bos_token_id=None,
    )


@pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([7, 8], (7, 8)), (None, ()), ([], ()), (0, (0,))], ids=repr)
def test_end_tokens(eos, expected):
    assert parse_config(changed(eos_token_id=eos)).eos_token_ids == expected


def test_end_tokens_of_generation_config_are_added(tmp_path):
    """Llama 3 instruct lists its end-of-turn token only there."""
    (tmp_path / "config.json").write_text(json.dumps(changed(eos_token_id=2)))
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert read_config(tmp_path).eos_token_ids == (2, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert read_config(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("architecture", "settings", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, (None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, (None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows(architecture, settings, windows):
    assert parse_config({**LLAMA, "architectures": [architecture], **settings}).windows == windows


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", 0),
        ("sliding_window", 2.5),
        ("sliding_window", "all"),
        ("max_window_layers", None),
        ("layer_types", ["chunked_attention"] * 3),
    ],
)
def test_windows_that_make_no_sense_are_refused(name, value):
    raw = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, name: value}
    refused(raw, name)


@pytest.mark.parametrize("value", [None, 1, 1.0], ids=repr)
def test_whole_heads_may_say_that_they_rotate(value):
    assert parse_config(changed(partial_rotary_factor=value)) == parse_config(LLAMA)


@pytest.mark.parametrize(
    "architectures",
    [
        ["GPT2LMHeadModel"],
        ["DeepseekV3ForCausalLM"],
        ["Gemma4AssistantForCausalLM"],
        [],
        None,
        "LlamaForCausalLM",
        [None],
        [[]],
        [{}],
    ],
)
def test_other_architectures_are_refused_with_those_that_are_known(architectures):
    refused(changed(architectures=architectures), "architecture", "not supported", *ARCHITECTURES)


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [], 2**40, 2**31 + 1, math.nan, {}], ids=repr)
@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
def test_sizes_must_be_positive_whole_numbers(name, value):
    refused(changed(**{name: value}), name)


def test_a_huge_number_of_layers_is_refused_at_once():
    refused(changed(num_hidden_layers=2**31), "num_hidden_layers", "10000")


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_missing_sizes_are_named(name):
    refused({k: v for k, v in LLAMA.items() if k != name}, name)


@pytest.mark.parametrize("value", [0, -1e-5, math.nan, math.inf, "1e-5", True, []], ids=repr)
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_numbers_must_be_positive_and_finite(name, value):
    refused(changed(**{name: value}), name)


def test_heads_that_do_not_fit_are_refused():
    refused(changed(num_key_value_heads=3), "4 heads", "3 KV heads")
    refused(changed(head_dim=7), "head_dim 7", "even")
    refused(changed(num_attention_heads=64, num_key_value_heads=64), "head_dim")  # more heads than hidden units


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", ["llama3"]], ids=str)
@pytest.mark.parametrize(("where", "key"), [("rope_scaling", "type"), ("rope_parameters", "rope_type")])
def test_unknown_rope_scaling_is_refused(where, key, kind):
    refused(changed(**{where: {key: kind, "factor": 2.0}}), str(kind), "not supported", "llama3")


@pytest.mark.parametrize("rope", ["linear", 3, ["llama3"]], ids=repr)
def test_rope_settings_must_be_an_object(rope):
    refused(changed(rope_scaling=rope), "rope", "object")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("factor", 0),
        ("factor", "8"),
        ("factor", None),
        ("low_freq_factor", -1),
        ("high_freq_factor", math.nan),
        ("original_max_position_embeddings", 0),
        ("rope_theta", -1.0),
        ("high_freq_factor", 1.0),  # equal to low_freq_factor: the band between them would divide by zero
    ],
)
def test_rope_numbers_are_checked(name, value):
    refused(changed(rope_parameters={**LLAMA3_ROPE, name: value}), name)


def test_other_kinds_of_model_are_refused_by_their_flag():
    refused(changed(hidden_act="gelu"), "hidden_act", "gelu")
    refused(changed(partial_rotary_factor=0.5), "partial_rotary_factor")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "missing"),
        ("{", "JSON"),
        ("[1]", "object"),
        ("null", "object"),
        (b"\xff\xfe\x00", "JSON"),
        ("", "JSON"),
        ("[" * 100_000, "JSON"),
    ],
    ids=lambda t: repr(t)[:20],
)
def test_files_that_are_no_config(text, word, tmp_path):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelLoadError, match=word) as caught:
        read_config(tmp_path)
    assert str(path) in str(caught.value)


def test_a_folder_in_the_place_of_config_json(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["llama3", "llama3.1", "llama3.2", "llama-linear"])
def test_rope_frequencies_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    raw = VARIANTS[name].raw
    config = parse_config(raw)
    theirs = transformers.LlamaConfig(**{k: v for k, v in raw.items() if k not in ("architectures", "model_type")})
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    ours = inverse_frequencies(config.rope, config.head_dim)
    torch.testing.assert_close(ours, rotary.inv_freq, rtol=1e-6, atol=0)
    cos, sin = rotary(torch.zeros(1), torch.arange(256)[None])
    half = config.head_dim // 2
    table = rope_table(config.rope, config.head_dim, 256)
    torch.testing.assert_close(table, torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1), rtol=0, atol=1e-5)


def test_llama3_bands():
    """Frequencies of short wavelengths stay, those of long ones are divided by the factor, those between blended."""
    rope = parse_config(changed(rope_parameters=LLAMA3_ROPE)).rope
    plain = inverse_frequencies(RopeConfig(theta=rope.theta), 12)
    scaled = inverse_frequencies(rope, 12)
    wavelength = 2 * math.pi / plain
    for i in range(6):
        ratio = (plain[i] / scaled[i]).item()
        if wavelength[i] < 64 / 4:
            assert ratio == 1
        elif wavelength[i] > 64:
            assert ratio == pytest.approx(8)
        else:
            assert 1 < ratio < 8
    assert {bool(w < 16) for w in wavelength} == {True, False}
    assert any(16 < w < 64 for w in wavelength)


def test_positions_far_out_keep_their_angle():
    """Float32 angles at position 100,000 are as close to float64 as float32 products allow, as in transformers."""
    rope = RopeConfig(theta=500000.0)
    table = rope_table(rope, 64, 100_001)[-1].double()
    inverse = rope.theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    exact = torch.cat([(100_000 * inverse).cos(), (100_000 * inverse).sin()])
    assert (table - exact).abs().max() < 0.02


def test_end_tokens_that_the_model_has_not_are_left_out(tmp_path, caplog):
    size = changed()["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(changed(eos_token_id=2, bos_token_id=-1)))
    for eos, expected in (([3, size, -1, "x"], (3, 2)), ([size, size + 9], (2,)), (size - 1, (size - 1, 2))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        caplog.clear()
        config = read_config(tmp_path)
        assert (config.eos_token_ids, config.bos_token_id) == (expected, None)
        told = [r.getMessage() for r in caplog.records if "generation_config.json" in r.getMessage()]
        assert len(told) == (expected[0] != size - 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_moe_block", True),
        ("use_bidirectional_attention", "all"),
        ("num_kv_shared_layers", 3),  # no layer is left that writes a cache
        ("hidden_size_per_layer_input", -1),
        ("final_logit_softcapping", "30"),
    ],
)
def test_gemmas_that_are_not_supported_are_refused(name, value):
    raw = {**VARIANTS["gemma4"].raw, name: value}
    refused(raw, name)
