"""Shapes of known models by name, by their public config.json: their speed can be measured without their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sameseed.errors import ConfigError, nearest
from sameseed.models.config import ModelConfig, parse_config
from sameseed.models.loader import read_config, resolve_model


def _raw(
    architecture: str, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocabulary: int, **more: Any
) -> dict[str, Any]:
    """A config.json; `heads` are query heads, KV heads and head dimension."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads)),
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": None,
        **more,
    }


def _llama3(hidden: int, inner: int, layers: int, heads: tuple[int, int, int], factor: float, tied: bool) -> Any:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    own = {"rope_theta": 500000.0, "rope_scaling": scaling, "max_position_embeddings": 131072}
    return _raw("Llama", hidden, inner, layers, heads, 128256, tie_word_embeddings=tied, **own)


def _qwen3(hidden: int, inner: int, layers: int, heads: tuple[int, int, int], tied: bool, **more: Any) -> Any:
    own = {"rope_theta": 1e6, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "use_sliding_window": False}
    name = "Qwen3Moe" if more else "Qwen3"
    return _raw(name, hidden, inner, layers, heads, 151936, tie_word_embeddings=tied, **own, **more)


def _llama2(hidden: int, inner: int, layers: int, heads: tuple[int, int, int]) -> Any:
    own = {"rope_theta": 1e4, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    return _raw("Llama", hidden, inner, layers, heads, 32000, **own)


def _smollm2(hidden: int, inner: int, layers: int, heads: tuple[int, int, int]) -> Any:
    return _raw("Llama", hidden, inner, layers, heads, 49152, rope_theta=1e5, max_position_embeddings=8192)


_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False}
_YARN["original_max_position_embeddings"] = 4096
_OSS: dict[str, Any] = {"attention_bias": True, "num_local_experts": 32, "num_experts_per_tok": 4}
_OSS |= {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "rope_parameters": _YARN}
_OSS |= {"max_position_embeddings": 131072, "tie_word_embeddings": False}
_MISTRAL = {"rope_theta": 1e6, "max_position_embeddings": 32768, "tie_word_embeddings": False}
_TINY = {"rope_theta": 1e4, "max_position_embeddings": 2048, "tie_word_embeddings": False}

SHAPES: Mapping[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama3(2048, 8192, 16, (32, 8, 64), 32.0, True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, (24, 8, 128), 32.0, True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, (32, 8, 128), 8.0, False),
    "llama-3.1-70b": _llama3(8192, 28672, 80, (64, 8, 128), 8.0, False),
    "llama-2-7b": _llama2(4096, 11008, 32, (32, 32, 128)),
    "llama-2-13b": _llama2(5120, 13824, 40, (40, 40, 128)),
    "llama-2-70b": _llama2(8192, 28672, 80, (64, 8, 128)),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, (16, 8, 128), True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, (16, 8, 128), True),
    "qwen3-4b": _qwen3(2560, 9728, 36, (32, 8, 128), True),
    "qwen3-8b": _qwen3(4096, 12288, 36, (32, 8, 128), False),
    "qwen3-30b-a3b": _qwen3(2048, 6144, 48, (32, 4, 128), False, **_MOE),
    "gpt-oss-20b": _raw("GptOss", 2880, 2880, 24, (64, 8, 64), 201088, **_OSS),
    "mistral-7b": _raw("Mistral", 4096, 14336, 32, (32, 8, 128), 32768, **_MISTRAL),  # v0.3: no sliding window
    "smollm2-135m": _smollm2(576, 1536, 30, (9, 3, 64)),
    "smollm2-360m": _smollm2(960, 2560, 32, (15, 5, 64)),
    "tinyllama-1.1b": _raw("Llama", 2048, 5632, 22, (32, 4, 64), 32000, **_TINY),
}
NAMES = (*SHAPES, "embedded")


def get_shape(name: str, other: str = "--model") -> ModelConfig:
    """The config of a shape; the name is case-insensitive.

    Raises ConfigError with the nearest name. `other`: the option that takes a checkpoint, for the message.
    """
    known = name.lower()
    if known == "embedded":
        return read_config(resolve_model("embedded"))
    if known not in SHAPES:
        hint = nearest(known, NAMES)
        raise ConfigError(f"no shape {name!r}{hint} (there are: {', '.join(NAMES)}; for a checkpoint, {other})")
    return parse_config(SHAPES[known], where=f"shape {known}")


def shape_as_dict(name: str, config: ModelConfig) -> dict[str, object]:
    """A shape as plain data for a record."""
    facts = "architecture num_parameters num_layers hidden_size intermediate_size num_heads num_kv_heads head_dim "
    facts += "vocab_size max_model_len tied_embeddings"
    return {"name": name, **{fact: getattr(config, fact) for fact in facts.split()}}
