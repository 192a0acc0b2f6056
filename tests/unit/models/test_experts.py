"""Families with experts: transformers' logits at every position; stacked tensors, MXFP4 blocks and GGUF files."""

import json
from functools import reduce

import gguf
import numpy as np
import pytest
import torch
from fixtures_gguf import write_gguf
from fixtures_models import (
    GEMMA4,
    all_logits,
    joined_experts,
    load,
    oracle_logits,
    prompt,
    published_experts,
    random_tensors,
)  # fmt: skip
from safetensors.torch import save_file

from sameseed import scheme
from sameseed.errors import ModelLoadError
from sameseed.models.config import parse_config

SHARED = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "eos_token_id": 2, "num_local_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False}
MODELS = {
    "qwen": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 32,
        "norm_topk_prob": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {**YARN, "rope_theta": 150000.0},
    },
    "gemma": {
        **GEMMA4, "architectures": ["Gemma4ForCausalLM"], "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 2, "moe_intermediate_size": 32,
    },
}  # fmt: skip
MODELS["lfm2"] = {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "num_experts": 6, "moe_intermediate_size": 32,
    "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1, "norm_eps": 1e-5,
    "routed_scaling_factor": 1.5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
MODELS["qwen-dense-layers"] = {**MODELS["qwen"], "norm_topk_prob": False, "mlp_only_layers": [1]}


def written(folder, name, **changes):
    folder.mkdir(exist_ok=True)
    raw = {**SHARED, **MODELS[name], "dtype": "float32"}
    tensors = random_tensors(parse_config(raw))
    tensors |= {n: t / 2 for n, t in tensors.items() if ".experts." in n}
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))
    stored = tensors if "qwen" in name or name == "lfm2" else published_experts(tensors, name == "gpt-oss")
    if name == "lfm2":
        words = {"mlp.experts": "feed_forward.experts", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        stored = {reduce(lambda n, w: n.replace(*w), words.items(), n): x for n, x in stored.items()}
    stored = {n.replace(".mlp.experts", ".experts") if name == "gemma" else n: x for n, x in stored.items()}
    save_file(stored, folder / "model.safetensors")
    return folder, raw, tensors


def close(got, wanted, tolerance):
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
    if tolerance < 1e-3:
        assert got.argmax(-1).equal(wanted.argmax(-1))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_are_those_of_transformers(name, backend, tmp_path):
    folder, _, _ = written(tmp_path / "model", name)
    ids = prompt(150)
    close(all_logits(load(folder, backend), ids), oracle_logits(folder, ids), 2e-5)


@pytest.mark.parametrize("name", ["qwen", "gpt-oss", "gemma", "lfm2"])
@pytest.mark.parametrize(
    ("kind", "tolerance", "joined"),
    [("F32", 2e-5, False), ("F32", 2e-5, True), ("Q8_0", 0.1, True), ("MXFP4", 0.7, False)],
)
def test_gguf_files(name, kind, tolerance, joined, tmp_path):
    """Also where gate and up of all experts are one tensor."""
    folder, raw, tensors = written(tmp_path / "model", name)
    parts = joined_experts(tensors)
    for gate in [n for n in parts if joined and ".experts." in n and ".gate_proj." in n]:
        parts[gate.replace("gate_", "gate_up_")] = torch.cat(
            [parts.pop(gate), parts.pop(gate.replace("gate", "up"))], 1
        )
    keys = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}
    if name == "gpt-oss":
        keys |= {"expert_feed_forward_length": 96, "attention.sliding_window": 32, "rope.scaling.type": "yarn"}
        keys |= {"rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
    if name == "gemma":
        keys |= {"attention.sliding_window": 32, "attention.sliding_window_pattern": [True, False] * 2}
        keys |= {"attention.head_count_kv": [2, 1] * 2, "attention.key_length_swa": 16}
        keys |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 32)
    if name == "lfm2":
        keys |= {"attention.head_count_kv": [0, 2, 0, 0], "shortconv.l_cache": 3, "leading_dense_block_count": 1}
        keys |= {"expert_weights_scale": 1.5, "expert_gating_func": 2}
    path = tmp_path / "model.gguf"
    arch = {"qwen": "qwen3moe", "gemma": "gemma4", "lfm2": "lfm2moe"}.get(name, name)
    write_gguf(path, raw, parts, lambda n: kind if "_exps.weight" in n else "F32", arch, keys)
    ids, tolerance = prompt(90), tolerance * 2 if (name, kind) == ("gemma", "Q8_0") else tolerance
    wanted = all_logits(load(folder), ids)
    for backend in ("reference", "cpu"):
        close(all_logits(load(path, backend), ids), wanted, tolerance)
    if kind == "F32":
        write_gguf(path, raw, parts, arch=arch, keys={**keys, "expert_count": 7})
        with pytest.raises(ModelLoadError, match="its keys say"):
            load(path)
    if name == "gemma":  # an expert's scale is the router's, which multiplies with it
        blocks = np.full((6, 64, 36), 0x11, np.uint8)
        raw["moe_intermediate_size"] = keys["expert_feed_forward_length"] = 64
        parts = joined_experts(random_tensors(parse_config(raw)))
        write_gguf(path, raw, parts, arch=arch, keys=keys, blobs={"blk.0.ffn_down_exps.weight": (blocks, "NVFP4")})
        meant = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)
        down = load(path, weights="fp32").weights.layers[0].experts.down
        assert all(matrix.parts["weight"].equal(torch.from_numpy(meant[0])) for matrix in down)


def test_gpt_oss_keeps_mxfp4_blocks_as_stored(tmp_path):
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    folder, raw, tensors = written(tmp_path / "model", "gpt-oss", **quantized)
    fmt, decoded = scheme.get("mxfp4"), {}
    codes = {}
    for name, value in tensors.items():
        decoded[name] = value
        if ".experts." in name and name.endswith("weight"):
            q = fmt.encode(value)
            decoded[name], codes[name] = fmt.decode(q), fmt.checkpoint("x", q)["x.weight_packed"]
            codes[f"{name}.scale"] = fmt.checkpoint("x", q)["x.weight_scale"]
    whole, joined = published_experts(decoded, True), joined_experts(codes)
    blocks = {n: t for n, t in whole.items() if not n.endswith(("gate_up_proj", "down_proj"))}
    for i in range(raw["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp.experts"
        for suffix, end in (("_blocks", "weight"), ("_scales", "weight.scale")):
            gate, up, down = (joined[f"{at}.0.{p}_proj.{end}"] for p in ("gate", "up", "down"))
            both = torch.stack([gate, up], dim=2).flatten(1, 2)
            shape = (-1, 16) if suffix == "_blocks" else (-1,)
            blocks[f"{at}.gate_up_proj{suffix}"] = both.unflatten(-1, shape).contiguous()
            blocks[f"{at}.down_proj{suffix}"] = down.unflatten(-1, shape).contiguous()
    save_file(blocks, folder / "model.safetensors")
    plain, _, _ = written(tmp_path / "plain", "gpt-oss")
    save_file(whole, plain / "model.safetensors")
    ids, model = prompt(60), load(folder, "cpu")
    assert {m.format for m in model.weights.layers[0].experts.down} == {"mxfp4"}
    close(all_logits(model, ids), all_logits(load(plain), ids), 0.1)
    (folder / "config.json").write_text(json.dumps({**raw, **quantized, "num_local_experts": 5}))
    with pytest.raises(ModelLoadError, match="quantization_config"):
        load(folder)


def test_stacked_experts_of_qwen_and_their_number(tmp_path):
    folder, raw, tensors = written(tmp_path / "model", "qwen")
    wanted = all_logits(load(folder), prompt(20))
    save_file(published_experts(tensors), folder / "model.safetensors")
    assert all_logits(load(folder), prompt(20)).equal(wanted)
    (folder / "config.json").write_text(json.dumps({**raw, "num_local_experts": 8}))
    with pytest.raises(ModelLoadError, match="asks for"):
        load(folder)
