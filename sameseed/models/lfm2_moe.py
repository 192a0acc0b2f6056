"""LFM2 and LFM2.5 with experts: from some layer on they stand in place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.models.config import View, positive_number, whole_number
from sameseed.models.layers import AttentionWeights
from sameseed.models.lfm2 import Lfm2, Lfm2Config
from sameseed.models.qwen3_moe import MoeConfig, Qwen3Moe, expert_shapes, expert_views, with_experts
from sameseed.models.weights import Shapes, WeightReader

ROUTER = "feed_forward.gate"


@dataclass(frozen=True)
class Lfm2MoeConfig(Lfm2Config, MoeConfig):
    """`factor`: of the weights of a row's experts."""

    factor: float = 1.0

    @property
    def mixtures(self) -> range:
        return range(len(self.dense_layers), self.num_layers)


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeLayer(AttentionWeights):
    """As `Lfm2Layer`, with experts."""

    conv: Tensor | None = None


class Lfm2Moe(Lfm2):
    """The decoder of LFM2 with experts."""

    gguf_names: ClassVar[Mapping[str, str]] = {
        **Lfm2.gguf_names,
        ROUTER: "ffn_gate_inp",
        "feed_forward.expert_bias": "exp_probs_b.bias",
        **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    }
    gguf_keys: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Lfm2.gguf_keys,
        **Qwen3Moe.gguf_keys,
        "num_dense_layers": ("leading_dense_block_count", 0),
        "routed_scaling_factor": ("expert_weights_scale", 1.0),
    }

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> Lfm2MoeConfig:
        base = super().parse({**raw, "block_auto_adjust_ff_dim": False}, where)
        if not raw.get("use_expert_bias", True):
            raise ModelLoadError(f"{where}: use_expert_bias false is not supported; LFM2 and LFM2.5 have these biases")
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
        return {**shapes, **expert_shapes(config, at, ROUTER), f"{at}.feed_forward.expert_bias": (config.num_experts,)}

    @classmethod
    def views(cls, config: Lfm2MoeConfig) -> dict[str, View]:
        views = (found for i in config.mixtures for found in expert_views(config, f"model.layers.{i}").items())
        return {n: v._replace(tensor=v.tensor.replace(".mlp.", ".feed_forward.")) for n, v in views}

    @classmethod
    def read_layer(cls, reader: WeightReader, layer: int) -> AttentionWeights:
        c, at = reader.config, f"model.layers.{layer}"
        if layer not in c.mixtures:
            return super().read_layer(reader, layer)
        bias = reader.vector(f"{at}.feed_forward.expert_bias")
        experts = replace(Qwen3Moe.read_experts(reader, c, at, ROUTER), chosen_by=bias, factor=c.factor)
        return Lfm2MoeLayer(**cls.read_mixer(reader, layer), experts=experts)


MODEL = Lfm2Moe
