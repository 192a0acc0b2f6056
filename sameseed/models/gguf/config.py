"""The config of a GGUF file's model, converted to an equivalent Hugging Face config.json."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import torch

from sameseed.errors import ModelLoadError
from sameseed.models.config import GGUF_ARCHITECTURES, ModelConfig, RopeConfig, family, one_of, parse_config
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.layers import inverse_frequencies

FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies
LONG_FACTORS = "rope_factors_long.weight"  # LongRoPE's, which a family reads
# Tokens that end an answer, by spelling as in llama.cpp: a file may name only one of them, and type others as words.
ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "</s>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]", "<eos>", "<turn|>", "<|tool_response>",
}  # fmt: skip
HTML = {"</s>"}  # none, unless it is a control token
# Of these, the last is none where the file has all the others: it only ends a part of an answer.
NO_ENDS = (("<|return|>", "<|call|>", "<|end|>"), ("<|calls|>", "<|flush|>", "<|end|>"), ("<|tool_response>", "</s>"))
# Roles of tokens that end an answer; as in llama.cpp also of those that pad, or separate files of code.
END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
ROLE = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")
NO_MODEL = {  # by general.type or architecture
    "adapter": "is an adapter; merge it into its base model (llama-export-lora), and give that",
    "clip": "sees or hears for a language model; give the file of that",
}
CONTROL = 3  # the type of control tokens


def _architecture(file: GGUFFile) -> str:
    """llama.cpp's name of the architecture. Raises ModelLoadError for a file that is no whole model of a known one."""
    meta, where = file.metadata, file.path
    arch = meta.get("general.architecture")
    if (what := NO_MODEL.get(str(meta.get("general.type"))) or NO_MODEL.get(str(arch))) is not None:
        raise ModelLoadError(f"{where} {what}")
    if isinstance(meta.get("split.count"), int) and meta["split.count"] > 1:  # only the first part names it
        raise ModelLoadError(f"{where} is one of {meta['split.count']} parts; join them with llama-gguf-split --merge")
    if meta.get(f"{arch}.attention.causal") is False:
        raise ModelLoadError(f"{where} embeds texts: its attention is not causal; take a model that writes them")
    return one_of(arch, GGUF_ARCHITECTURES, f"{where}: architecture")


def raw_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json of the file's model. Raises ModelLoadError for features that its family does not have."""
    meta, where, arch = file.metadata, file.path, _architecture(file)
    model = family(GGUF_ARCHITECTURES[arch][0])
    get = partial(file.number, by_layer=model.by_layer)
    hidden, heads, dim = _sizes(file, arch)
    qkv_bias, o_bias = ("blk.0.attn_q.bias" in file.tensors), ("blk.0.attn_output.bias" in file.tensors)
    name, kind = GGUF_ARCHITECTURES[arch]
    if kind == "llama" and qkv_bias and not o_bias:
        name, kind = GGUF_ARCHITECTURES["qwen2"]  # a Llama with these biases equals Qwen2
    rope = {"rope_theta": float(get("rope.freq_base", 10000.0)), **_scaling(file, arch)}
    if not model.rotates_all:
        rope["partial_rotary_factor"] = get("rope.dimension_count", dim) / max(1, dim)
    raw: dict[str, Any] = {
        "architectures": [name],
        "model_type": kind,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length", meta.get(f"{arch}.expert_feed_forward_length")),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "eos_token_id": list(end_tokens(file)),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "suppress_tokens": np.asarray(meta.get("tokenizer.ggml.suppress_tokens", [])).tolist() or None,
    }
    if name != "Qwen2ForCausalLM":
        raw |= {"attention_bias": qkv_bias}
    if "blk.0.ffn_up.bias" in file.tensors:
        raw |= {"mlp_bias": True}
    raw |= model.gguf_config(file, raw)
    rope |= _factors(file, parse_config(raw, where=str(where)))
    return raw


def _sizes(file: GGUFFile, arch: str) -> tuple[int, int, int]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing; does the file hold the whole model?")
    hidden, heads = file.number("embedding_length"), file.number("attention.head_count")
    if type(hidden) is not int or type(heads) is not int or heads < 1:
        raise ModelLoadError(f"{file.path}: {hidden!r} values and {heads!r} heads are no model")
    dim = file.number("attention.key_length", hidden // heads)
    rotates = file.number("rope.dimension_count", dim) == dim or not family(GGUF_ARCHITECTURES[arch][0]).rotates_all
    if file.number("attention.value_length", dim) != dim or not rotates:
        raise ModelLoadError(f"{file.path}: keys, values and rotation must all have {dim} dimensions a head")
    return hidden, heads, dim


def end_tokens(file: GGUFFile) -> dict[int, list[str]]:
    """Token ids that end a text, with what says so: the keys of END_ROLES, and control tokens spelled as in ENDS."""
    meta, found = file.metadata, dict[int, list[str]]()
    for key in (f"tokenizer.ggml.{role}_token_id" for role in END_ROLES):
        if type(token := meta.get(key)) is int:
            found.setdefault(token, []).append(key)
    tokens, types = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        named = {t: i for i, t in enumerate(tokens) if t in ENDS and (types[i] == CONTROL or t not in HTML)}
        parts = {whole[-1] for whole in NO_ENDS if named.keys() >= set(whole)}
        for name, token in named.items():
            if name not in parts:
                found.setdefault(token, []).append("tokenizer.ggml.token_type")
    return found


def special_tokens(file: GGUFFile) -> dict[int, list[str]]:
    """Token ids with a role, with the keys that name them."""
    found: dict[int, list[str]] = {}
    for key, token in file.metadata.items():
        if (role := ROLE.fullmatch(key)) and type(token) is int:
            found.setdefault(token, []).append(f"{role[1]}, {key}")
    return found


def _scaling(file: GGUFFile, arch: str) -> dict[str, Any]:
    meta = file.metadata
    # As in llama.cpp: the default type is linear, and the older key of the factor is read if the newer one is missing.
    kind = meta.get(f"{arch}.rope.scaling.type", "linear")
    factor = meta.get(f"{arch}.rope.scaling.factor", meta.get(f"{arch}.rope.scale_linear", 1.0))
    kinds = ("none", "linear", "yarn", *(["longrope"] if LONG_FACTORS in file.tensors else []))
    one_of(kind, kinds, f"{file.path}: rope scaling")
    usual = {"attn_factor": (1,), "yarn_ext_factor": (-1, float(kind == "yarn"))}  # Phi-3 reads the first
    for key in list(usual)[LONG_FACTORS in file.tensors :]:
        found, name = file.number(f"rope.scaling.{key}", usual[key][0]), f"{arch}.rope.scaling.{key}"
        one_of(found, usual[key], f"{file.path}: {name}", "take the model's Hugging Face folder")
    if kind in ("none", "longrope") or factor in (0.0, 1.0):
        return {"rope_type": "default"}
    if kind == "yarn":
        original = file.number("rope.scaling.original_context_length")
        betas = {f"beta_{b}": file.number(f"rope.scaling.yarn_beta_{b}", 0) for b in ("fast", "slow")}
        known = {name: value for name, value in betas.items() if value}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **known}
    return {"rope_type": "linear", "factor": factor}


def _factors(file: GGUFFile, config: ModelConfig) -> dict[str, Any]:
    """Rope settings from the file's factor per frequency: Llama 3's scaling if it gives these, else "factors"."""
    if FACTORS not in file.tensors or config.rope.kind == "factors":  # the family knows them
        return {}
    if config.rope.kind != "default":
        raise ModelLoadError(f"{file.path}: tensor {FACTORS} does not fit the model, whose frequencies are scaled")
    factors = torch.tensor(file.factors(FACTORS, config.head_dim // 2))
    plain = inverse_frequencies(config.rope, config.head_dim)
    factor = float(factors.max())
    for original in (8192, config.max_model_len, max(1, round(config.max_model_len / factor))):
        rope = RopeConfig(config.rope.theta, "llama3", factor, 1.0, 4.0, original)
        if torch.allclose(plain / inverse_frequencies(rope, config.head_dim), factors, rtol=1e-3):
            bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", "factor": factor, **bands}
    return {"rope_type": "factors", "factors": factors.tolist()}
