"""GGUF files: the same model as its Hugging Face folder, with the file's own codes if a kernel supports them."""

import logging
import math
import os
import struct
from contextlib import closing
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from fixtures_gguf import as_type, gguf_bytes, info, key, text, write_gguf
from fixtures_models import (
    LLAMA3_ROPE,
    VARIANTS,
    all_logits,
    backends,
    fails,
    load,
    prompt,
    random_tensors,
    write_checkpoint,
)

from sameseed import ops
from sameseed.config import EngineConfig
from sameseed.engine.memory import block_bytes, demand
from sameseed.errors import ModelLoadError
from sameseed.models.config import GGUF_ARCHITECTURES, LONGROPE, parse_config
from sameseed.models.gguf.header import COMMON, GGUFFile
from sameseed.models.gguf.source import DECODED, GGUFCheckpoint, gguf_name
from sameseed.models.layers import inverse_frequencies
from sameseed.models.loader import load_tokenizer, open_checkpoint, read_config, resolve_model
from sameseed.models.phi3 import IN_GGUF
from sameseed.models.weights import read_weights, weight_bytes
from sameseed.scheme import QuantScheme, get

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64, "vocab_size": 96}
RAW = {**VARIANTS["llama2"].raw, **WIDE, "num_key_value_heads": 2}


def refused(path, *words):
    fails(lambda: load(path), str(path), *words)


BY_NAME = {name: arch for arch, (name, _) in GGUF_ARCHITECTURES.items()}
NAMES = ("llama2", "llama3", "llama3.2", "llama-biases", "mistral-full", "qwen2", "qwen2.5-tied", "qwen3")
NAMES += ("smollm3", "granite", "ministral3", "phi4-mini", "phi3", "lfm2", "gemma3", "gemma4", "gemma4-e")
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
ARCH_KEYS = {
    "ministral3": {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1,
    },
    "granite": {"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.3, "logit_scale": 2.5},
    "phi4-mini": {
        "rope.dimension_count": 12, "rope.scaling.type": "longrope", "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(64)), "attention.sliding_window": 0,
    },
    "phi3": {"attention.sliding_window": 7},
    "lfm2": {"attention.head_count_kv": [0, 2, 0, 0], "shortconv.l_cache": 4, "feed_forward_length": 72},
    "gemma3": {
        "attention.sliding_window": 7, "final_logit_softcapping": 8.0, "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    },
    "gemma4": {
        "attention.sliding_window": 7,
        "attention.sliding_window_pattern": [True, True, False],
        "attention.head_count_kv": [2, 2, 1],
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 32),
        "attention.key_length_swa": 16,
        "final_logit_softcapping": 8.0,
    },
    "gemma4-e": {
        "attention.sliding_window": 7,
        "attention.sliding_window_pattern": [True, False, True, False],
        "attention.shared_kv_layers": 2,
        "feed_forward_length": [72, 72, 144, 144],
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 32),
        "attention.key_length_swa": 16,
        "embedding_length_per_layer_input": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_folder_it_was_made_of(name, tmp_path):
    """Bit for bit: the order of q and k rows, biases, norms, a tied output, rope."""
    variant = VARIANTS[name]
    tensors = random_tensors(parse_config(variant.raw))
    want = all_logits(load(write_checkpoint(tmp_path / "folder", variant)), prompt(variant.length))
    if variant.raw["rope_parameters"].get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(variant.raw)
    tensors |= longrope_factors(variant.raw)
    arch = BY_NAME.get(variant.architecture, "llama")
    path = write_gguf(tmp_path / "model.gguf", variant.raw, tensors, arch=arch, keys=ARCH_KEYS.get(name))
    got = all_logits(load(path), prompt(variant.length))
    exact = "rope_freqs.weight" not in tensors  # float32 factors equal the bands up to rounding
    assert got.equal(want) if exact else (got - want).abs().max() < 1e-3


def longrope_factors(raw):
    rope = raw["rope_parameters"]
    return {f"{g}.weight": torch.tensor(rope[n]) for n, g in zip(LONGROPE, IN_GGUF, strict=True) if n in rope}


def llama3_factors(raw):
    """Rope factors as llama.cpp's converter writes them: how much longer each wave becomes."""
    config = parse_config(raw)
    plain, scaled = (
        inverse_frequencies(r, config.head_dim) for r in (replace(config.rope, kind="default"), config.rope)
    )
    return plain / scaled


def test_llama3_scaling_is_found_again_in_its_factors(tmp_path):
    raw = {
        **RAW,
        "rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
        "max_position_embeddings": 65536,
    }
    tensors = random_tensors(parse_config(raw)) | {"rope_freqs.weight": llama3_factors(raw)}
    rope = read_config(write_gguf(tmp_path / "a.gguf", raw, tensors)).rope
    assert rope == parse_config(raw).rope
    odd = {**tensors, "rope_freqs.weight": torch.linspace(1, 3, 32)}
    rope = read_config(write_gguf(tmp_path / "b.gguf", raw, odd)).rope
    assert rope.kind == "factors"
    plain = inverse_frequencies(parse_config({**raw, "rope_parameters": {"rope_theta": 500000.0}}).rope, 64)
    assert torch.allclose(inverse_frequencies(rope, 64) * torch.linspace(1, 3, 32), plain)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0),  # as in llama.cpp: linear if no type is given
        ({"rope.scale_linear": 2.0}, 2.0),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4.0),
        ({"rope.scaling.type": "linear"}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "none", "rope.scale_linear": 2.0}, 1.0),
        ({}, 1.0),
    ],
)
def test_rope_scaling_by_its_keys(keys, factor, tmp_path):
    raw = VARIANTS["llama3.2"].raw | {"rope_parameters": {"rope_theta": 10000.0}}
    path = write_gguf(tmp_path / "model.gguf", raw, random_tensors(parse_config(raw)), keys=keys)
    rope = read_config(path).rope
    assert (rope.kind, rope.factor) == (("default", 1.0) if factor == 1.0 else ("linear", factor))


def test_scales_of_mistral3_are_those_of_its_keys(tmp_path):
    raw, keys = VARIANTS["ministral3"].raw, ARCH_KEYS["ministral3"]
    without = {k: v for k, v in keys.items() if not k.endswith(("yarn_log_multiplier", "temperature_scale"))}
    tensors = random_tensors(parse_config(raw))
    found = [read_config(write_gguf(tmp_path / "a", raw, tensors, arch="mistral3", keys=k)) for k in (keys, without)]
    assert [c.rope.magnitude for c in found] == [1.0, pytest.approx(1 + 0.1 * math.log(4))]
    assert [c.max_model_len for c in found] == [64, 256]  # without, queries far out are not scaled
    scaling = {**raw["rope_parameters"], "mscale_all_dim": 0, "llama_4_scaling_beta": 0}
    assert parse_config(raw | {"rope_parameters": scaling}).rope.magnitude == found[1].rope.magnitude


def test_gemma3_files_of_other_converters(tmp_path):
    raw = VARIANTS["gemma3"].raw
    keys = {"rope.freq_base": None, "rope.global.freq_base": 1e6, "rope.local.freq_base": 1e4}
    config = read_config(write_gguf(tmp_path / "a", raw, random_tensors(parse_config(raw)), arch="gemma3", keys=keys))
    assert (config.rope.theta, set(config.windows)) == (1e6, {None})  # no window is named


def kinds(kind):
    return lambda name: kind


@pytest.mark.parametrize(
    ("kind", "text_"),
    [("Q4_0", "w4a8-g32"), ("Q8_0", "w8a8-g32"), ("MXFP4", "mxfp4-a8")]
    + [(kind, f"{kind.lower()}-a8") for kind in ("Q4_1", "Q5_0", "Q5_1")],
)
def test_types_that_kernels_have_keep_their_codes(kind, text_, tmp_path, caplog):
    """Decoded codes equal the values of the gguf package's own reader, row by row, permuted or not."""
    tensors = random_tensors(parse_config(RAW))
    path = write_gguf(tmp_path / "model.gguf", RAW, tensors, kinds(kind))
    type_ = gguf.GGMLQuantizationType[kind]
    with caplog.at_level(logging.WARNING), GGUFCheckpoint(path) as source:
        source.check(read_config(path))
        for name, weight in tensors.items():
            if weight.ndim == 1:
                continue
            assert str(source.scheme(name)) == text_
            meant = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), type_), type_))
            q = source.stored(name)
            assert get(q.format).decode(q).equal(meant), name
            assert source.rows(name, 17, 70).equal(meant[17:70]), name
    assert not caplog.records
    want = all_logits(load(path, weights="fp32"), prompt(12))
    for backend in backends():
        model = load(path, backend)
        assert {m.format for m in model.weights.matrices} == {get(q.format).name}
        got = all_logits(model, prompt(12))
        assert (got - want).norm() < 0.05 * want.norm()  # int8 rows
        if backend == "cpu":  # in the file's own size; MXFP4's exponents are stored as bf16
            assert sum(m.nbytes for m in model.weights.matrices) < 1.1 * path.stat().st_size


@pytest.mark.parametrize(
    ("kind", "other", "cache"),
    [("F32", "F32", "fp32"), ("Q8_0", "Q8_0", "bf16"), ("F16", "F16", "fp16"), ("Q8_0", "F32", "bf16"),
     ("BF16", "Q4_0", "bf16"), ("F16", "Q4_0", "fp16")],
)  # fmt: skip
def test_the_cache_is_as_wide_as_the_matrices_whatever_the_norms(kind, other, cache, tmp_path):
    """All vectors of these files are F32."""
    tensors = random_tensors(parse_config(RAW))
    path = write_gguf(tmp_path / "m.gguf", RAW, tensors, lambda name: kind if "ffn" in name else other)
    model = load(path)
    assert model.weights.dense == cache
    planned = demand(path, QuantScheme(), EngineConfig()).block
    assert planned == block_bytes(model.config, cache, EngineConfig().cache.block_size)
    assert load(path, weights="fp32").weights.dense == "fp32"


def test_types_that_no_kernel_has_are_rounded_with_a_notice_and_exact_on_demand(tmp_path, caplog):
    kind = "TQ2_0"
    tensors = random_tensors(parse_config(RAW))
    path = write_gguf(tmp_path / "model.gguf", RAW, tensors, kinds(kind))
    with caplog.at_level(logging.WARNING):
        model = load(path)
        load(path)
    (told,) = [r.getMessage() for r in caplog.records]
    assert kind in told and "--format fp32" in told
    type_ = gguf.GGMLQuantizationType[kind]
    weight = tensors["model.layers.0.mlp.down_proj.weight"].numpy()
    meant = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, type_), type_))
    down = model.weights.layers[0].down
    assert 0.0 < (get(down.format).decode(down) - meant).norm() / meant.norm() < 0.007
    assert load(path, weights="fp32").weights.layers[0].down.parts["weight"].equal(meant)


def random_blocks(height, width, kind, *scales_at):
    """Rows of blocks with random bits, and small scales at the given offsets."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (height * width // values, size), dtype=np.uint8)
    small = (rng.random(len(blocks)).astype(np.float16) - np.float16(0.5)) * np.float16(0.002)
    for at in scales_at:
        blocks[:, at : at + 2] = small[:, None].view(np.uint8)
    return blocks.reshape(height, -1)


@pytest.mark.parametrize(
    ("kind", "at", "text_"),
    [
        ("Q2_K", (80, 82), "q2_k-a8"), ("Q3_K", (108,), "q6_k-a8"), ("Q4_K", (0, 2), "q4_k-a8"),
        ("Q5_K", (0, 2), "q5_k-a8"), ("Q6_K", (208,), "q6_k-a8"), ("IQ4_NL", (0,), "iq4_nl-a8"),
        ("IQ4_XS", (0,), "iq4_nl-a8"),
    ],
)  # fmt: skip
def test_random_blocks_mean_what_the_gguf_package_says(kind, at, text_, tmp_path, caplog):
    """Values are exactly the file's, in chunks and in rows of another order, and every backend runs a model of them."""
    tensors = random_tensors(parse_config(RAW))
    matrices = {gguf_name(n): t.shape for n, t in tensors.items() if t.ndim == 2}
    blobs = {n: (random_blocks(*shape, kind, *at), kind) for n, shape in matrices.items()}
    path = write_gguf(tmp_path / "model.gguf", RAW, tensors, blobs=blobs)
    with caplog.at_level(logging.WARNING), GGUFCheckpoint(path) as source:
        source.check(read_config(path))
        for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
            q, type_ = source.stored(name), gguf.GGMLQuantizationType[kind]
            meant = torch.from_numpy(gguf.quants.dequantize(blobs[gguf_name(name)][0], type_))
            if "k_proj" in name:  # the file has this matrix's rows in another order
                meant = meant.view(2, 32, 2, 256).transpose(1, 2).reshape(128, 256)
            assert torch.allclose(get(q.format).decode(q), meant, rtol=1e-6, atol=1e-7)
            assert str(source.scheme(name)) == text_ and q.activations == "int8"
            chunks = torch.cat([source.rows(name, a, b) for a, b in ((0, 5), (5, 70), (70, len(meant)))])
            assert chunks.equal(get(q.format).decode(q)) and source.dtype(name) == torch.float32
    want = all_logits(load(path, weights="fp32"), prompt(12))
    for backend in backends():
        model = load(path, backend)
        assert {m.format for m in model.weights.matrices} == {q.format}
        assert (all_logits(model, prompt(12)) - want).norm() < (0.2 if kind == "Q6_K" else 0.05) * want.norm()
        down = load(path, weights="fp32").weights.layers[0].down.parts["weight"]
        own = model.weights.layers[0].down
        assert get(q.format).decode(ops.resolve(backend).unpack(own)).equal(down)
    assert not any("--format fp32" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("kinds_", [("Q6_K", "Q3_K"), ("Q3_K", "Q6_K"), ("IQ4_NL", "IQ4_XS")])
def test_joined_matrices_of_two_types(kinds_, tmp_path):
    """Two types may have one format here; they are joined all the same, each read as what it is."""
    tensors, at = random_tensors(parse_config(RAW)), {"Q6_K": 208, "Q3_K": 108}
    names = [f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up")]
    blobs = {gguf_name(n): (random_blocks(*tensors[n].shape, k, at.get(k, 0)), k) for n, k in zip(names, kinds_)}
    path = write_gguf(tmp_path / "model.gguf", RAW, tensors, blobs=blobs)
    with GGUFCheckpoint(path) as source:
        source.check(read_config(path))
        wanted = torch.cat([get(kind.format).decode(kind) for kind in map(source.stored, names)])
    for backend in backends():
        read = load(path, backend).weights.layers[0].gate_up
        parts = read if isinstance(read, tuple) else (read,)
        assert torch.cat([get(w.format).decode(ops.resolve(backend).unpack(w)) for w in parts]).equal(wanted)


def test_nvfp4_blocks_have_a_scale_beside_them(tmp_path):
    name, tensors = "model.layers.0.mlp.down_proj.weight", random_tensors(parse_config(RAW))
    more = {name.replace("weight", "scale"): torch.tensor([0.25]), name.replace("weight", "input_scale"): torch.ones(1)}
    data = random_blocks(*tensors[name].shape, "NVFP4")
    data.reshape(-1, 36)[:, :4] = 0x30  # scales of sixteen values each
    meant = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType.NVFP4)) * 0.25
    path = write_gguf(tmp_path / "a.gguf", RAW, tensors | more, blobs={gguf_name(name): (data, "NVFP4")})
    assert load(path, weights="fp32").weights.layers[0].down.parts["weight"].equal(meant)
    more = {name.replace("weight", "scale"): torch.ones(2)}
    path = write_gguf(tmp_path / "b.gguf", RAW, tensors | more, blobs={gguf_name(name): (data, "NVFP4")})
    refused(path, "scale", "ffn_down")


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_large_matrices(kind, tmp_path):
    """Read in chunks, or packed as they are read; a chunk may begin within a rotated head. Rows end within a block."""
    raw = RAW | {"vocab_size": 4999, "head_dim": 96, "num_attention_heads": 48, "tie_word_embeddings": True}
    tensors = {n: t for n, t in random_tensors(parse_config(raw)).items() if n != "lm_head.weight"}
    path = write_gguf(tmp_path / "model.gguf", raw, tensors, kinds(kind))
    with GGUFCheckpoint(path) as source:
        source.check(read_config(path))
        q = source.rows("model.layers.0.self_attn.q_proj.weight", 0, 4608).float()
        embedding = source.rows("model.embed_tokens.weight", 0, 4999).float()
    for backend in backends():
        unpack, weights = ops.resolve(backend).unpack, load(path, backend).weights
        read = weights.layers[0].qkv
        parts = read if isinstance(read, tuple) else (read,)
        assert torch.cat([get(w.format).decode(unpack(w)) for w in parts])[:4608].equal(q)
        assert get(weights.embedding.format).decode(unpack(weights.embedding)).equal(embedding)


def test_k_quants_without_a_kernel_are_rounded_with_a_notice(tmp_path, caplog):
    path = write_gguf(tmp_path / "model.gguf", RAW, random_tensors(parse_config(RAW)), kinds("Q4_K"))
    with caplog.at_level(logging.WARNING):
        model = load(path, "cpu", weights="q4_k")  # with float rows
    assert {m.format for m in model.weights.matrices} == {"int8"}
    assert ["--format fp32" in r.getMessage() for r in caplog.records] == [True]


def test_memory_is_planned_for_what_k_quants_become(tmp_path):
    """4.5 bits per weight if kernels support the codes, otherwise 8.5."""
    path = write_gguf(tmp_path / "model.gguf", RAW, random_tensors(parse_config(RAW)), kinds("Q4_K"))
    config = read_config(path)
    with GGUFCheckpoint(path) as source:
        kept = weight_bytes(config, source, QuantScheme())
        rounded = weight_bytes(config, source, QuantScheme(), device="cuda")
        assert rounded == weight_bytes(config, source, QuantScheme.parse("w8a16-g32")) > 1.8 * kept
        assert weight_bytes(config, source, QuantScheme.parse("q4_k")) == rounded  # with float rows


def test_every_decoded_type_is_one_that_the_package_decodes():
    for kind in DECODED:
        type_ = gguf.GGMLQuantizationType[kind]
        values, size = gguf.GGML_QUANT_SIZES[type_]
        assert gguf.quants.dequantize(np.zeros((1, size), np.uint8), type_).shape == (1, values)


def test_a_file_a_folder_with_one_and_one_with_two(tmp_path):
    tensors = random_tensors(parse_config(RAW))
    path = write_gguf(tmp_path / "a.gguf", RAW, tensors)
    (tmp_path / "a-mmproj-F16.gguf").touch()  # what sees for a model is no language model
    assert resolve_model(str(path)) == path and resolve_model(str(tmp_path)) == path
    (tmp_path / "b.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelLoadError, match="holds 2 GGUF files; name one of them"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()  # now it is a Hugging Face folder that also holds GGUF files
    assert resolve_model(str(tmp_path)) == tmp_path
    for name in ("model.safetensors", "b.gguf"):
        (tmp_path / name).unlink()
    (tmp_path / "config.json").write_text("{}")  # as some put beside their GGUF files
    assert resolve_model(str(tmp_path)) == path


def test_other_files(tmp_path):
    path, falcon = tmp_path / "model.gguf", key("general.architecture", 8, text("falcon"))
    for keys, *words in (
        ([falcon], "falcon", "llama, qwen2, qwen3"),
        ([key("general.architecture", 8, text("clip"))], "the file of that"),
        ([key("general.type", 8, text("adapter"))], "merge it into its base"),
        ([falcon, key("falcon.attention.causal", 7, b"\0")], "not causal"),
    ):
        path.write_bytes(gguf_bytes(keys, [], b""))
        refused(path, *words)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    refused(path, "big-endian", "convert it")


@pytest.mark.parametrize(
    ("name", "keys", "tensors", "words"),
    [
        ("llama2", {"expert_count": 8}, {}, ["experts"]),
        ("llama2", {"logit_scale": 8.0, "residual_scale": 1.0}, {}, ["logit_scale '8.0'", "0, 1", "folder"]),
        ("qwen3", {"attention.scale": 0.2}, {}, ["attention.scale '0.2"]),
        ("granite", {"final_logit_softcapping": 30.0}, {}, ["final_logit_softcapping '30.0'"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, {}, ["attn_logit_softcapping '50.0'"]),
        ("llama2", {"rope.scaling.type": "longrope"}, {}, ["longrope", "linear"]),
        ("llama2", {"attention.value_length": 32}, {}, ["dimensions"]),
        ("llama2", {"rope.scaling.attn_factor": 1.5}, {}, ["attn_factor '1.5'", "folder"]),
        ("llama2", {**YARN, "rope.scaling.yarn_ext_factor": 0.0}, {}, ["yarn_ext_factor '0.0'", "-1, 1.0"]),
        ("llama2", {}, {"model.layers.0.mlp.up_proj.weight": None}, ["ffn_up", "missing"]),
        ("llama2", {}, {"model.layers.3.mlp.up_proj.weight": torch.ones(8, 48)}, ["unexpected", "blk.3.ffn_up.weight"]),
        ("llama2", {}, {"model.layers.0.mlp.up_proj.weight": torch.ones(48, 36)}, ["ffn_up", "[48, 36]"]),
        ("phi4-mini", {}, {"rope_factors_short.weight": None}, ["rope_factors_short", "missing"]),
        ("phi4-mini", {}, {"rope_factors_long.weight": torch.ones(5)}, ["rope_factors_long", "[5]"]),
        ("phi4-mini", {}, {"rope_factors_long.weight": -torch.ones(6)}, ["rope_factors_long", "no factors"]),
        ("phi4-mini", {"rope.dimension_count": 7}, {}, ["rope_factors_short", "[6]"]),
        ("phi4-mini", {"rope.scaling.original_context_length": 0}, {}, ["original_max_position_embeddings"]),
        ("lfm2", {"expert_count": 8}, {}, ["experts"]),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, {}, ["layer_types"]),
        ("lfm2", {"attention.head_count_kv": [0, 2, 0, 2]}, {}, ["blk.3.attn_q", "missing"]),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0, 0]}, {}, ["num_key_value_heads"]),
        ("lfm2", {"shortconv.l_cache": 9}, {}, ["conv_L_cache"]),
        ("lfm2", {}, {"model.layers.0.conv.conv.weight": torch.ones(48, 3)}, ["shortconv.conv", "[48, 3]"]),
    ],
    ids=str,
)
def test_files_that_contradict_themselves(name, keys, tensors, words, tmp_path):
    variant = VARIANTS[name]
    usual = random_tensors(parse_config(variant.raw)) | longrope_factors(variant.raw) | tensors
    given = {n: t for n, t in usual.items() if t is not None}
    arch, keys = BY_NAME[variant.architecture], ARCH_KEYS.get(name, {}) | keys
    refused(write_gguf(tmp_path / "m.gguf", variant.raw, given, arch=arch, keys=keys), *words)


@pytest.mark.parametrize(("kind", "at"), [("Q8_0", 0), ("Q4_1", 0), ("Q5_1", 2), ("Q4_K", 2), ("Q6_K", 208)])
def test_numbers_that_are_none(kind, at, tmp_path):
    """The scale, or the least value, of a row's first block is infinite."""
    tensors = random_tensors(parse_config(RAW))
    name = "model.layers.0.mlp.up_proj.weight"
    data = as_type(tensors[name], kind)
    data[3, at : at + 2] = [0, 0x7C]
    refused(write_gguf(tmp_path / "m.gguf", RAW, tensors, blobs={gguf_name(name): (data, kind)}), "NaN or infinity")


def test_a_dtype_is_that_of_what_is_not_quantized(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", RAW, random_tensors(parse_config(RAW)), lambda n: "Q8_0" if "ffn" in n else "F32"
    )
    as_stored, half = (load(path, weights=w).weights.layers[0] for w in ("auto", "auto-fp16"))
    assert (as_stored.down.format, as_stored.o.format) == ("int8", "fp32")
    assert (half.down.format, half.o.format) == ("int8", "fp16")


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", RAW, random_tensors(parse_config(RAW)), kinds("Q8_0"))
    config = read_config(path)
    with GGUFCheckpoint(path) as source:
        source.check(config)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ModelLoadError, match="download"):
            read_weights(config, source, QuantScheme(), ops.resolve("auto"))


KEYS = [key("general.architecture", 8, text("llama")), key("general.alignment", 4, struct.pack("<I", 32))]
SOUND = [info("a", [4], 0, 0), info("b", [32, 2], 2, 32)]


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "header wants"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (gguf_bytes(KEYS, SOUND, bytes(68), version=1), "version 1"),
        (gguf_bytes(KEYS, SOUND, bytes(68), counts=(2**40, 2)), "tensors and"),
        (gguf_bytes([*KEYS, KEYS[0]], SOUND, bytes(68)), "twice"),
        (gguf_bytes(KEYS, [SOUND[0], SOUND[0]], bytes(68)), "twice"),
        (gguf_bytes([struct.pack("<Q", 2**62) + b"abc"], SOUND, bytes(68)), "a text of"),
        (gguf_bytes([key("x", 13, b"")], [], b""), "unknown type 13"),
        (gguf_bytes([key("x", 9, struct.pack("<IQ", 8, 2**60))], [], b""), "an array of"),
        (gguf_bytes([key("x", 9, struct.pack("<IQ", 9, 1))], [], b""), "of type 9"),
        (gguf_bytes([key("general.alignment", 4, struct.pack("<I", 0))], SOUND, bytes(68)), "alignment of 0"),
        (gguf_bytes(KEYS, [info("a", [], 0, 0)], bytes(68)), "0 dimensions"),
        (gguf_bytes(KEYS, [info("a", [2**40, 2**40], 0, 0)], bytes(68)), "does not fit"),
        (gguf_bytes(KEYS, [info("a", [31], 2, 0)], bytes(68)), "which blocks of 32 do not divide"),
        (gguf_bytes(KEYS, [info("a", [4], 0, 2**63)], bytes(68)), "does not fit"),
        (gguf_bytes(KEYS, [info("a", [4], 0, 16)], bytes(68)), "unaligned"),
        (gguf_bytes(KEYS, [info("a", [12], 0, 0), info("b", [4], 0, 32)], bytes(68)), "overlaps"),
        (gguf_bytes(KEYS, [info("a", [4], 0, 64)], bytes(68)), "ends behind"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_headers_that_contradict_themselves(data, word, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        GGUFFile(path)
    assert word in str(caught.value) and str(path) in str(caught.value) and "download it again" in str(caught.value)


def test_a_type_that_is_newer_than_the_package(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(KEYS, [info("a", [4], 99, 0)], bytes(68)))
    newest = max(gguf.GGMLQuantizationType)
    refused(path, "'a' is of type 99", f"newest: {newest.name}, {newest.value}", "pip install -U gguf")


def test_common_types_are_those_of_the_package():
    for number, (name, *block) in COMMON.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, tuple(block)) == (name, gguf.GGML_QUANT_SIZES[kind])


def test_a_header_is_read_again_after_the_file_has_changed(tmp_path):
    path = tmp_path / "model.gguf"
    for value in (1, 2):
        path.write_bytes(gguf_bytes([*KEYS, key("n", 4, struct.pack("<I", value))], SOUND, bytes(68)))
        os.utime(path, (1, value))  # long ago, so that a reader may keep what it read
        for _ in range(2):
            with closing(GGUFFile(path)) as file:
                assert file.metadata["n"] == value


def test_a_part_of_several_files_says_how_to_join_them(tmp_path):
    path = tmp_path / "model-00001-of-00002.gguf"
    path.write_bytes(gguf_bytes([KEYS[0], key("split.count", 2, struct.pack("<H", 2))], SOUND, bytes(68)))
    refused(path, "one of 2 parts", "--merge")


def test_a_file_without_tokens_says_so(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", RAW, random_tensors(parse_config(RAW)))
    with pytest.raises(ModelLoadError, match="holds no tokenizer"):
        load_tokenizer(path)


def test_the_file_is_closed(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", RAW, random_tensors(parse_config(RAW)))
    with open_checkpoint(path) as source:
        source.check(read_config(path))
    with pytest.raises(OSError, match="descriptor"):
        source.tensor("model.norm.weight")
