"""config.json: what is read, and errors that name the field."""

import json
import math

import pytest
import torch
from fixtures_models import BASE, LLAMA3_ROPE, VARIANTS, fails

from sameseed.errors import ConfigError, ModelLoadError
from sameseed.models.config import RopeConfig, llama_only, parse_config
from sameseed.models.layers import rope_table
from sameseed.models.loader import read_config
from sameseed.models.weights import expected_shapes

LLAMA = {"architectures": ["LlamaForCausalLM"], **BASE}


def changed(**values):
    return {**LLAMA, **values}


def refused(raw, *words):
    fails(lambda: parse_config(raw, where="somewhere/config.json"), "somewhere/config.json", *words)


@pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([7, 8], (7, 8)), (None, ()), ([], ()), (0, (0,))], ids=repr)
def test_end_tokens(eos, expected):
    assert parse_config(changed(eos_token_id=eos)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (2,)),
        ({"eos_token_id": [2, 9]}, (2, 9)),  # Llama 3 instruct lists its end-of-turn token only there
        ({"temperature": 0.6}, (2,)),
        ({"eos_token_id": [3, 97, -1, "x"]}, (3, 2)),  # the vocabulary has 97 tokens
        ({"eos_token_id": [97, 106]}, (2,)),
    ],
)
def test_end_tokens_of_generation_config_are_added(generation, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed(eos_token_id=2, bos_token_id=-1, suppress_tokens=[7])))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = read_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id, config.suppress_tokens) == (expected, None, (7,))
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [5, 97]}))
    assert read_config(tmp_path).suppress_tokens == (5,)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
TURNS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("architecture", "settings", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, (None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, (None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "layer_types": TURNS}, (8, None, 8)),
        ("Qwen3MoeForCausalLM", {**EXPERTS, "sliding_window": 8, "use_sliding_window": True}, (8, 8, 8)),
    ],
)
def test_windows(architecture, settings, windows):
    assert parse_config({**LLAMA, "architectures": [architecture], **settings}).windows == windows


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MORE_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
QWEN = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
PHI4 = VARIANTS["phi4-mini"].raw
# Values that no setting may have, by setting. The error names the setting.
IMPOSSIBLE = {
    **{key: [0, -1, 1.5, "64", True, [], 2**40, 2**31 + 1, math.nan, {}] for key in (*SIZES, *MORE_SIZES)},
    **{key: [0, -1e-5, math.nan, math.inf, "1e-5", True, []] for key in ("rms_norm_eps", "rope_theta")},
    "architecture": [["GPT2LMHeadModel"], ["DeepseekV3ForCausalLM"], [], None, "LlamaForCausalLM", [None], [[]], [{}]],
    "hidden_act": ["gelu"],
    "partial_rotary_factor": [0.5],
}
# Settings of other models that cannot be read, and what the error names.
REFUSED = [
    *(({**QWEN, "sliding_window": value}, "sliding_window") for value in (0, 2.5, "all")),
    ({**QWEN, "max_window_layers": -1}, "max_window_layers"),
    ({**QWEN, "layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ({"num_hidden_layers": 2**31}, "num_hidden_layers"),  # at once
    ({"num_key_value_heads": 3}, "3 KV heads"),
    ({"rope_scaling": {"type": "dynamic"}}, "take it out"),
    ({"head_dim": 7}, "even"),
    ({"num_attention_heads": 64, "num_key_value_heads": 64}, "head_dim"),  # more heads than hidden units
    *(({"rope_scaling": rope}, "object") for rope in ("linear", 3, ["llama3"], {"full_attention": {}})),
    *(
        ({where: {key: kind, "factor": 2.0}}, "not supported")
        for kind in ("dynamic", "mrope", ["llama3"])
        for where, key in (("rope_scaling", "type"), ("rope_parameters", "rope_type"))
    ),
    *(
        ({"rope_parameters": {**LLAMA3_ROPE, name: value}}, name)
        for name, values in (  # the two factors may not be equal: the band between them would divide by zero
            *(("factor", [0]), ("low_freq_factor", [-1]), ("high_freq_factor", [math.nan, 1.0])),
            *(("original_max_position_embeddings", [0]), ("rope_theta", [-1.0])),
        )
        for value in values
    ),
    *(
        ({**VARIANTS["gemma4"].raw, name: value}, name)
        for name, value in (  # with 3 shared layers, none is left that writes a cache
            *(("use_bidirectional_attention", "all"), ("num_kv_shared_layers", 3)),
            ("hidden_size_per_layer_input", -1),
        )
    ),
    *(
        ({**VARIANTS["gemma4"].raw, name: value}, "of another kind")
        for name, value in (
            *(("final_logit_softcapping", "x"), ("layer_types", [[]]), ("per_layer_config", "x")),
            ("rope_parameters", {"full_attention": 3}),
        )
    ),
    *(
        ({**PHI4, name: value, "rope_parameters": {**PHI4["rope_parameters"], name: value}}, name)
        for name, value in (  # 0.45: 7 of 16 dimensions
            *(("short_factor", [1.0] * 5), ("long_factor", None), ("long_factor", [1.0] * 5 + [0])),
            *(("original_max_position_embeddings", 1), ("partial_rotary_factor", 0.45), ("attention_factor", -1)),
        )
    ),
    *(
        ({**VARIANTS["lfm2"].raw, name: value}, name)
        for name, value in (
            *(("conv_bias", True), ("conv_L_cache", 9), ("block_ff_dim", 0), ("layer_types", ["conv"] * 3)),
            ("layer_types", ["conv", "full_attention", "sliding_attention", "conv"]),
        )
    ),
    ({**VARIANTS["lfm2"].raw, "architectures": ["Lfm2MoeForCausalLM"], "use_expert_bias": False}, "use_expert_bias"),
    ({**VARIANTS["granite4"].raw, "num_local_experts": 8}, "Granite 4"),
    ({**VARIANTS["granite4"].raw, "layer_types": ["mamba", "attention", "attention"]}, "Granite 4"),
    ({"rope_scaling": {"type": "su"}}, "short_factor"),
]


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_values_are_refused_by_their_name(name):
    key = "architectures" if name == "architecture" else name
    for value in IMPOSSIBLE[name]:
        refused(changed(**{key: value}), name)
    if name in SIZES:
        refused({k: v for k, v in LLAMA.items() if k != name}, name)


@pytest.mark.parametrize(("changes", "word"), REFUSED)
def test_settings_that_cannot_be_read_are_refused(changes, word):
    refused(changed(**changes), word)


@pytest.mark.parametrize(
    ("text", "word"),
    [(None, "missing"), ("{", "JSON"), ("[1]", "object"), ("[" * 100_000, "JSON")],
    ids=lambda t: repr(t)[:20],
)
def test_files_that_are_no_config(text, word, tmp_path):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelLoadError, match=word) as caught:
        read_config(tmp_path)
    assert str(path) in str(caught.value)


def test_rope_settings_that_are_null_are_added_by_a_user_or_older():
    nulls = dict.fromkeys(("factor", "beta_fast", "attention_factor", "rope_theta", "mscale"))
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    found = parse_config(changed(rope_parameters=rope | nulls)).rope
    assert (found.factor, found.beta_fast, found.theta) == (4.0, 32.0, 10000.0)
    assert found == parse_config(changed(rope_parameters=rope | {"mscale": 2.0})).rope  # one alone counts for nothing
    assert parse_config(changed(rope_parameters=rope, original_max_position_embeddings=32)).rope.original_max_len == 32
    older = {**PHI4, "rope_parameters": PHI4["rope_parameters"] | {"rope_type": "yarn"}}
    assert parse_config(older) == parse_config(PHI4), "it names factors"
    plain, added = {"rope_type": "default", "rope_theta": 5e5}, {"type": "linear", "factor": 4.0}
    rope = parse_config(changed(rope_parameters=plain, rope_scaling=added)).rope
    assert (rope.kind, rope.theta, rope.factor) == ("linear", 5e5, 4.0)
    newer = {k: v for k, v in VARIANTS["gemma3"].raw.items() if k != "rope_parameters"}
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert parse_config({**newer, **older}) == parse_config(VARIANTS["gemma3"].raw)


def test_positions_far_out_keep_their_angle():
    """Float32 angles at position 100,000 are as close to float64 as float32 products allow, as in transformers."""
    rope = RopeConfig(theta=500000.0)
    table = rope_table(rope, 64, 100_001)[-1].double()
    inverse = rope.theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    exact = torch.cat([(100_000 * inverse).cos(), (100_000 * inverse).sin()])
    assert (table - exact).abs().max() < 0.02


@pytest.mark.parametrize("name", ["smollm3", "granite", "gemma4", "phi4-mini", "lfm2"])
def test_what_computes_layers_anew_refuses_other_layers(name):
    assert llama_only(parse_config(VARIANTS["qwen3"].raw), "quantize")
    with pytest.raises(ConfigError, match="use a model of"):
        llama_only(parse_config(VARIANTS[name].raw), "quantize")


@pytest.mark.parametrize("kind", ["Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe"])
def test_what_a_text_config_leaves_out_is_what_transformers_takes(kind):
    """As in gemma-3-4b-it, whose text_config names four sizes of nine."""
    transformers = pytest.importorskip("transformers")
    whole, names = getattr(transformers, f"{kind}TextConfig")().to_dict(), [f"{kind}ForConditionalGeneration"]
    bare = {"architectures": names, "text_config": {n: whole[n] for n in ("model_type", "layer_types")}}
    assert parse_config(bare) == parse_config({**whole, "architectures": names})
    assert ("model.embed_tokens_per_layer.weight" in expected_shapes(parse_config(bare))) == (kind == "Gemma4")


def test_gpt_oss_alternates_and_stretches_as_transformers_takes_it():
    whole = pytest.importorskip("transformers").GptOssConfig().to_dict()
    left_out = ("layer_types", "rope_parameters", "head_dim", "num_key_value_heads", "max_position_embeddings")
    bare = {k: v for k, v in whole.items() if k not in left_out}
    read = [parse_config({**raw, "architectures": ["GptOssForCausalLM"]}) for raw in (whole, bare)]
    assert read[0] == read[1] and read[1].windows[:3] == (128, None, 128) and read[1].rope.factor == 32


def test_layers_of_smollm3_slide_where_transformers_says():
    config = pytest.importorskip("transformers").SmolLM3Config
    raw = {**VARIANTS["smollm3"].raw, "sliding_window": 16}
    kinds = ["sliding_attention", *["full_attention"] * (raw["num_hidden_layers"] - 1)]
    for more in ({}, {"use_sliding_window": True}, {"layer_types": kinds}):
        named = {n: raw[n] for n in ("num_hidden_layers", "no_rope_layers", "no_rope_layer_interval") if n in raw}
        wanted = config(sliding_window=16, **named, **more).layer_types
        assert [w == 16 for w in parse_config({**raw, **more}).windows] == [k == "sliding_attention" for k in wanted]


@pytest.mark.parametrize(
    ("full", "turned", "by"),
    [({"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 4.0}, 0.25, 4.0),
     ({"rope_type": "proportional"}, 1, 1.0), (None, 0.25, 1.0)],
)  # fmt: skip
def test_the_share_of_gemma_4s_wide_heads_that_turns(full, turned, by):
    raw = VARIANTS["gemma4"].raw
    kinds = {"full_attention": {"rope_theta": 1e6, **full}, "sliding_attention": {"rope_theta": 1e4}} if full else None
    rope, half = parse_config({**raw, "rope_parameters": kinds}).rope, parse_config(raw).head_dim // 2
    assert rope.kind == "factors" and rope.factors == (by,) * int(turned * half) + (math.inf,) * int(
        half - turned * half
    )
    plain = parse_config({**raw, "rope_parameters": {**(kinds or {}), "full_attention": {"rope_type": "default"}}})
    assert plain.rope.kind == "default"


def test_smollm3_ties_its_embeddings_unless_config_json_denies_it():
    told = [VARIANTS["smollm3"].raw, {**VARIANTS["smollm3"].raw, "tie_word_embeddings": None}, changed()]
    assert [parse_config(raw).tied_embeddings for raw in told] == [False, True, False]


def test_yarn_reaches_the_context_that_it_was_made_for():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    lengths = {n: parse_config(changed(max_position_embeddings=n, rope_scaling=yarn)).max_model_len for n in (80, 512)}
    assert lengths == {80: 256, 512: 512}, "users add yarn without raising the model's own limit"
