"""Gemma 4 with experts (26B-A4B): each layer adds some, which a router chooses, to its feed-forward network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sameseed.models.config import mlp_shapes
from sameseed.models.gemma import Gemma, GemmaConfig, GemmaLayer
from sameseed.models.qwen3_moe import Mixture, MoeConfig, with_experts
from sameseed.models.weights import Shapes, WeightReader
from sameseed.ops import Ops, normed_rows

NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


@dataclass(frozen=True)
class GemmaMoeConfig(MoeConfig, GemmaConfig):
    """`intermediate_size` is that of the network beside the experts."""


@dataclass(frozen=True)
class GemmaMoeLayer(GemmaLayer):
    """Norms [C]: of the network's output, of the experts' input and output, and of what the router reads."""

    norms: tuple[Tensor, ...] = ()
    router_norm: Tensor | None = None


class GemmaMoe(Mixture, Gemma):
    """The decoder of Gemma 4 with experts."""

    router = "router.proj"
    gguf_keys = Gemma.gguf_keys

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> GemmaConfig:
        base = super().parse({**raw, "architectures": ["Gemma4MoeForCausalLM"]}, where)
        return with_experts(GemmaMoeConfig, base, raw, where)

    @classmethod
    def layer_shapes(cls, config: Any, layer: int) -> Shapes:
        at = f"model.layers.{layer}"
        norms = {f"{at}.{name}.weight": (config.hidden_size,) for name in NORMS}
        scales = {f"{at}.router.scale": (config.hidden_size,), f"{at}.router.per_expert_scale": (config.num_experts,)}
        return {**super().layer_shapes(config, layer), **norms, **scales}

    @classmethod
    def mlp_shapes(cls, config: Any, at: str) -> Shapes:
        return {**mlp_shapes(config, f"{at}.mlp"), **super().mlp_shapes(config, at)}

    @classmethod
    def read_mlp(cls, reader: WeightReader, at: str) -> dict[str, Any]:
        factors = reader.vector(f"{at}.router.per_expert_scale")
        experts = replace(cls.read_experts(reader, at), act="gelu", factors=factors)
        return {**reader.mlp(at), "experts": experts}

    @classmethod
    def read_layer(cls, reader: WeightReader, layer: int) -> GemmaMoeLayer:
        at = f"model.layers.{layer}"
        return GemmaMoeLayer(
            **vars(super().read_layer(reader, layer)),
            norms=tuple(reader.norm(f"{at}.{name}") for name in NORMS),
            router_norm=reader.vector(f"{at}.router.scale") * reader.config.hidden_size**-0.5,
        )

    def _feed_forward(self, ops: Ops, w: Any, x: Tensor) -> Tensor:
        eps, (own, before, after) = self.config.rms_eps, w.norms
        logits = ops.product(normed_rows(x, w.router_norm, eps), w.experts.router)
        chosen = ops.experts(normed_rows(x, before, eps), w.experts, None, logits)
        return ops.norm_add(chosen, after, eps, ops.rms_norm(super()._feed_forward(ops, w, x), own, eps), 1.0)
