"""gpt-oss: biases, sinks in attention, alternating sliding windows, and experts with a clamped SwiGLU in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sameseed.models.config import ModelConfig, base_config, one_of
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.qwen3_moe import MoeConfig, Qwen3Moe, with_experts
from sameseed.models.weights import Shapes

# What a config.json may leave out.
KINDS = ("sliding_attention", "full_attention")  # of layers, which take turns
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


class GptOss(Qwen3Moe):
    """The decoder of gpt-oss."""

    router: ClassVar[str] = "mlp.router"
    interleaved: ClassVar[bool] = True  # MXFP4 has a layout of its own
    gguf_names: ClassVar[Mapping[str, str]] = {
        **Qwen3Moe.gguf_names,
        "mlp.router": "ffn_gate_inp",
        "self_attn.sinks": "attn_sinks.weight",
        "post_attention_layernorm": "post_attention_norm",
    }
    gguf_keys: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Qwen3Moe.gguf_keys,
        "intermediate_size": ("expert_feed_forward_length",),
        "sliding_window": ("attention.sliding_window",),
    }

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        one_of(raw.get("swiglu_alpha", 1.702), [1.702], f"{where}: swiglu_alpha")
        limit = float(raw.get("swiglu_limit", 7.0))
        if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
            raw = {**raw, "rope_parameters": YARN}
        if raw.get("layer_types") is None:
            raw = {**raw, "layer_types": [KINDS[i % 2] for i in range(raw["num_hidden_layers"])]}
        return with_experts(MoeConfig, base_config(raw, where), raw, where, "intermediate_size", limit=limit)

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().gguf_config(file, raw) | {"rope_parameters": {**raw["rope_parameters"], "truncate": False}}

    @classmethod
    def layer_shapes(cls, config: MoeConfig, layer: int) -> Shapes:
        sinks = {f"model.layers.{layer}.self_attn.sinks": (config.num_heads,)}
        return {**super().layer_shapes(config, layer), **sinks}
