"""Qwen3.5 and 3.6 with experts: beside those that the router chooses, each layer has a shared expert with a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sameseed.models.config import View, mlp_shapes, whole_number
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.layers import SharedGate
from sameseed.models.qwen3_moe import Mixture, MoeConfig, expert_views, with_experts
from sameseed.models.qwen35 import Qwen35, Qwen35Config, mtp_names
from sameseed.models.weights import Shapes, WeightReader
from sameseed.scheme import QuantScheme

SHARED, GATE = "mlp.shared_expert", "mlp.shared_expert_gate"


@dataclass(frozen=True)
class Qwen35MoeConfig(Qwen35Config, MoeConfig):
    """`intermediate_size` is that of the shared expert."""


class Qwen35Moe(Mixture, Qwen35):
    """The decoder of Qwen3.5 and 3.6 with experts."""

    gguf_names: ClassVar[Mapping[str, str]] = {
        **Qwen35.gguf_names,
        **Mixture.gguf_experts,
        **{f"{SHARED}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
        GATE: "ffn_gate_inp_shexp",
    }
    gguf_keys: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Qwen35.gguf_keys, **Mixture.gguf_keys}

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> Qwen35Config:
        shared = whole_number(raw, where, "shared_expert_intermediate_size")
        base = super().parse({**raw, "intermediate_size": shared}, where)
        return with_experts(Qwen35MoeConfig, base, raw, where)

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().gguf_config(file, raw)
        size = file.number("expert_shared_feed_forward_length", found["moe_intermediate_size"])
        return found | {"shared_expert_intermediate_size": size}

    @classmethod
    def mlp_shapes(cls, config: Any, at: str) -> Shapes:
        gate = {f"{at}.{GATE}.weight": (1, config.hidden_size)}
        return {**cls.expert_shapes(config, at), **mlp_shapes(config, f"{at}.{SHARED}"), **gate}

    @classmethod
    def views(cls, config: Any) -> dict[str, View]:
        return {**super().views(config), **expert_views(config, mtp_names(config)[-1])}

    @classmethod
    def spare(cls, config: Any) -> Seq[str]:
        views = {} if config.in_gguf else expert_views(config, mtp_names(config)[-1])
        return (*super().spare(config), *{view.tensor for view in views.values()})

    @classmethod
    def read_mlp(cls, reader: WeightReader, at: str) -> dict[str, Any]:
        size, device = reader.config.intermediate_size, reader.device
        columns = torch.arange(size, 2 * size, dtype=torch.int32, device=device)
        experts = cls.read_experts(reader, at)
        gate = reader.encode(reader.vector(f"{at}.{GATE}.weight").view(1, -1), QuantScheme("fp32"))
        shared = SharedGate(gate, columns, torch.zeros_like(columns))
        return {**reader.mlp(at, SHARED), "experts": experts, "shared": shared}


MODEL = Qwen35Moe
