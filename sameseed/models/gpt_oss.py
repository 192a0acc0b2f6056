"""gpt-oss: biases, sinks in attention, alternating sliding windows, and experts with a clamped SwiGLU in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from sameseed.errors import ModelLoadError
from sameseed.models.config import ModelConfig, View, base_config
from sameseed.models.qwen3_moe import MoeLayer, Qwen3Moe, moe

if TYPE_CHECKING:
    from sameseed.models.gguf.header import GGUFFile
    from sameseed.models.weights import Shapes, WeightReader


class GptOss(Qwen3Moe):
    """The decoder of gpt-oss."""

    router: ClassVar[str] = "mlp.router"
    gguf_names: ClassVar[Mapping[str, str]] = {
        **Qwen3Moe.gguf_names,
        "mlp.router": "ffn_gate_inp",
        "self_attn.sinks": "attn_sinks.weight",
        "post_attention_layernorm": "post_attention_norm",
    }

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        if raw.get("swiglu_alpha", 1.702) != 1.702:
            raise ModelLoadError(f"{where}: swiglu_alpha {raw['swiglu_alpha']!r} is not supported; only 1.702 is")
        base = base_config(raw, where)
        limit = float(raw.get("swiglu_limit", 7.0))
        return cls.mixture(base, raw, where, base.intermediate_size, normalize=True, limit=limit)

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        from sameseed.models.gguf.config import number

        get = partial(number, file, file.metadata["general.architecture"])
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(raw["num_hidden_layers"])]
        return {
            "num_experts": get("expert_count"),
            "num_experts_per_tok": get("expert_used_count"),
            "intermediate_size": get("expert_feed_forward_length"),
            "sliding_window": get("attention.sliding_window"),
            "layer_types": kinds,
            "rope_parameters": {**raw["rope_parameters"], "truncate": False},
        }

    @classmethod
    def layer_shapes(cls, config: ModelConfig, layer: int) -> Shapes:
        c, at = moe(config), f"model.layers.{layer}"
        shapes = {**super().layer_shapes(config, layer), f"{at}.self_attn.sinks": (c.num_heads,)}
        shapes[f"{at}.{cls.router}.bias"] = (c.num_experts,)
        for e in range(c.num_experts):
            for part, size in (("gate", c.expert_size), ("up", c.expert_size), ("down", c.hidden_size)):
                shapes[f"{at}.mlp.experts.{e}.{part}_proj.bias"] = (size,)
        return shapes

    @classmethod
    def views(cls, config: ModelConfig) -> dict[str, View]:
        """Stacked [E, C, 2 F] and [E, F, C]: rows of the gate and of up take turns. MXFP4 has a layout of its own."""
        c, found = moe(config), dict[str, View]()
        for i in range(c.num_layers):
            at = f"model.layers.{i}.mlp.experts"
            for e in range(c.num_experts):
                for part, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2)), ("down", slice(None))):
                    stacked = f"{at}.{'down' if part == 'down' else 'gate_up'}_proj"
                    height, width = (
                        (c.hidden_size, c.expert_size) if part == "down" else (2 * c.expert_size, c.hidden_size)
                    )
                    one = f"{at}.{e}.{part}_proj"
                    found[f"{one}.weight"] = View(stacked, (c.num_experts, width, height), e, rows, transposed=True)
                    found[f"{one}.bias"] = View(f"{stacked}_bias", (c.num_experts, height), e, rows)
        return found

    @classmethod
    def read_layer(cls, reader: WeightReader, layer: int) -> Any:
        c, at = moe(reader.config), f"model.layers.{layer}"
        sinks = reader.vector(f"{at}.self_attn.sinks")
        return MoeLayer(**reader.attention(at), experts=cls.read_experts(reader, c, at), sinks=sinks)


MODEL = GptOss
