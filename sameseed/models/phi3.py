"""Phi-3 and Phi-4, Phi-4-mini among them: Llama with q, k and v in one matrix, and gate and up in another.

In the mini models a part of each head rotates, by LongRoPE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any, ClassVar

from sameseed.models.config import LONGROPE, ModelConfig, base_config
from sameseed.models.decoder import Decoder
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.llama import Llama
from sameseed.models.weights import Shapes

IN_GGUF = ("rope_factors_short", "rope_factors_long")


class Phi3(Llama):
    """The decoder of Phi-3 and Phi-4."""

    rotates_all: ClassVar[bool] = False
    gguf_keys: ClassVar[Mapping[str, tuple[Any, ...]]] = {"sliding_window": ("attention.sliding_window", 0)}
    gguf_names: ClassVar[Mapping[str, str]] = {
        **Decoder.gguf_names,
        "self_attn.qkv_proj": "attn_qkv",
        "mlp.gate_up_proj": "ffn_up",
        **dict(zip(IN_GGUF, IN_GGUF, strict=True)),
    }

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        base = base_config(raw, where, rotates=1.0)
        return replace(base, windows=tuple(w if w and w < base.max_model_len else None for w in base.windows))

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        more, dim = super().gguf_config(file, raw), file.number("rope.dimension_count", raw["head_dim"])
        rope = dict(raw["rope_parameters"])
        if any(f"{name}.weight" in file.tensors for name in IN_GGUF):
            rope |= {n: list(file.factors(f"{g}.weight", dim // 2)) for n, g in zip(LONGROPE, IN_GGUF, strict=True)}
            rope |= {"rope_type": "longrope", "attention_factor": file.number("rope.scaling.attn_factor", 1.0)}
            rope |= {"original_max_position_embeddings": file.number("rope.scaling.original_context_length")}
        return {**more, "rope_parameters": rope, "sliding_window": more["sliding_window"] or None}

    @classmethod
    def spare(cls, config: ModelConfig) -> Seq[str]:
        return tuple(f"{name}.weight" for name in IN_GGUF) if config.rope.long_factors else ()

    @classmethod
    def layer_shapes(cls, config: ModelConfig, layer: int) -> Shapes:
        c, at, usual = config, f"model.layers.{layer}", super().layer_shapes(config, layer)
        fused = {
            f"{at}.self_attn.qkv_proj.weight": ((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size),
            f"{at}.mlp.gate_up_proj.weight": (2 * c.intermediate_size, c.hidden_size),
        }
        apart = tuple(f".{n}_proj.weight" for n in ("q", "k", "v", "gate", "up"))
        return fused | {name: shape for name, shape in usual.items() if not name.endswith(apart)}
