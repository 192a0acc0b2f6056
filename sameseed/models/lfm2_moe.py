"""LFM2 and LFM2.5 with experts: from some layer on they stand in place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sameseed.models.config import one_of, positive_number, whole_number
from sameseed.models.layers import LayerWeights
from sameseed.models.lfm2 import Lfm2, Lfm2Config, Lfm2Layer
from sameseed.models.qwen3_moe import Mixture, MoeConfig, with_experts
from sameseed.models.weights import Shapes, WeightReader


@dataclass(frozen=True)
class Lfm2MoeConfig(MoeConfig, Lfm2Config):
    """`factor`: of the weights of a row's experts."""

    factor: float = 1.0


class Lfm2Moe(Mixture, Lfm2):
    """The decoder of LFM2 with experts."""

    router = "feed_forward.gate"
    gguf_names: ClassVar[Mapping[str, str]] = {
        **Lfm2.gguf_names,
        **Mixture.gguf_experts,
        "feed_forward.gate": "ffn_gate_inp",
        "feed_forward.expert_bias": "exp_probs_b.bias",
    }
    gguf_keys: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Lfm2.gguf_keys,
        **Mixture.gguf_keys,
        "num_dense_layers": ("leading_dense_block_count", 0),
        "routed_scaling_factor": ("expert_weights_scale", 1.0),
    }

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> Lfm2MoeConfig:
        base = super().parse({**raw, "block_auto_adjust_ff_dim": False}, where)
        one_of(raw.get("use_expert_bias", True), [True], f"{where}: use_expert_bias")
        first = whole_number(raw, where, "num_dense_layers", 2, least=0, most=base.num_layers - 1)
        return with_experts(
            Lfm2MoeConfig,
            base,
            raw,
            where,
            normalize=bool(raw.get("norm_topk_prob", True)),
            dense_layers=frozenset(range(first)),
            factor=positive_number(raw, "routed_scaling_factor", 1.0, where),
        )

    @classmethod
    def layer_shapes(cls, config: Any, layer: int) -> Shapes:
        shapes, at = super().layer_shapes(config, layer), f"model.layers.{layer}"
        if layer not in config.mixtures:
            return shapes
        return {**shapes, **cls.expert_shapes(config, at), f"{at}.feed_forward.expert_bias": (config.num_experts,)}

    @classmethod
    def read_layer(cls, reader: WeightReader, layer: int) -> LayerWeights:
        c, at = reader.config, f"model.layers.{layer}"
        if layer not in c.mixtures:
            return super().read_layer(reader, layer)
        bias = reader.vector(f"{at}.feed_forward.expert_bias")
        experts = replace(cls.read_experts(reader, at), chosen_by=bias, factor=c.factor)
        return Lfm2Layer(**cls.read_mixer(reader, layer), experts=experts)


MODEL = Lfm2Moe
