"""Granite 4 without state-space layers and experts: Granite with an MLP whose gate and up are one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from sameseed.errors import ModelLoadError
from sameseed.models.config import ModelConfig, matrices
from sameseed.models.llama import Llama
from sameseed.models.weights import Shapes

ATTENTION = ("attention", "full_attention")  # in layer_types; the newer name is transformers 5's


class Granite4(Llama):
    """The decoder of dense Granite 4."""

    modules: ClassVar = {"mlp.gate_up_proj": "shared_mlp.input_linear", "mlp.down_proj": "shared_mlp.output_linear"}

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        kinds, turns = raw.get("layer_types"), raw.get("position_embedding_type")
        attends = isinstance(kinds, list) and all(kind in ATTENTION for kind in kinds)
        if not attends or raw.get("num_local_experts", 8):
            raise ModelLoadError(f"{where}: Granite 4 loads where all layers are attention (350M, 1B, micro); take one")
        inner = raw.get("shared_intermediate_size", 1024)
        base = super().parse({**raw, "architectures": ["GraniteForCausalLM"], "intermediate_size": inner}, where)
        still = frozenset() if turns == "rope" else frozenset(range(base.num_layers))
        return replace(base, architecture=raw["architectures"][0], still_layers=still)

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, at: str) -> Shapes:
        wide, inner = config.hidden_size, config.intermediate_size
        return matrices(at, dict(zip(cls.modules.values(), [(2 * inner, wide), (wide, inner)], strict=True)))
