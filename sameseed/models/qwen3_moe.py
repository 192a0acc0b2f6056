"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in place of the MLP of most layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig, View, base_config, matrices, whole_number
from sameseed.models.decoder import Decoder
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.llama import Llama
from sameseed.models.weights import Shapes, WeightReader
from sameseed.ops import BLOCK_OUTPUTS, ExpertWeights, parted
from sameseed.scheme import QuantTensor


@dataclass(frozen=True)
class MoeConfig(ModelConfig):
    """`num_experts` of width `expert_size` in all but the `dense_layers`; each row takes `top_k` of them.

    `normalize`: the weights of a row's experts sum to 1. `limit`: of gpt-oss's clamped SwiGLU. `distinct`: (rows, how
    many experts so many rows of the model's texts choose), ascending, if they were counted (cost/experts.py).
    """

    num_experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    normalize: bool = True
    dense_layers: frozenset[int] = frozenset()
    limit: float | None = None
    distinct: tuple[tuple[float, float], ...] = ()

    @property
    def mixtures(self) -> list[int]:
        """The layers with experts."""
        return [i for i in range(self.num_layers) if i not in self.dense_layers]

    @property
    def row_parameters(self) -> int:
        return super().row_parameters - self._expert_parameters(self.num_experts - self.top_k)

    @property
    def mlp_width(self) -> int:
        return max(super().mlp_width, self.top_k * (2 * self.expert_size + self.hidden_size))

    def _expert_parameters(self, count: float) -> int:
        """Number of weights of `count` experts in each layer that has experts."""
        return round(count * 3 * self.expert_size * self.hidden_size * len(self.mixtures))

    def read_share(self, rows: float, batch: float = 1.0) -> float:
        """By the counted `distinct` experts; else as if each row chose at random, as rows of different texts do."""
        missed = 1 - self.top_k / self.num_experts  # chance that a row at random leaves an expert out
        if self.distinct and missed:  # rows count as so many that choose at random as would choose as many experts
            at, same = zip(*((m, math.log(max(1 - n / self.num_experts, 1e-9), missed)) for m, n in self.distinct))
            rows = float(np.interp(rows / batch, at, same)) * max(batch, rows / at[-1])
        unread = self.num_experts * missed**rows
        looked_up = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return 1 - self._expert_parameters(unread) / (self.num_parameters - looked_up)


C = TypeVar("C", bound=MoeConfig)


def with_experts(
    kind: type[C],
    base: ModelConfig,
    raw: Mapping[str, Any],
    where: str,
    size: str = "moe_intermediate_size",
    **more: Any,
) -> C:
    """The config with the experts that config.json describes; `size`: the key of their width. Raises ModelLoadError."""
    counted = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    taken = "top_k_experts" if "top_k_experts" in raw else "num_experts_per_tok"
    count = whole_number(raw, where, counted, most=1 << 16)
    top_k, width = whole_number(raw, where, taken, most=count), whole_number(raw, where, size)
    return kind(**vars(base), num_experts=count, top_k=top_k, expert_size=width, **more)


class Mixture(Decoder):
    """What a family with experts adds to the class of its other layers."""

    router: ClassVar[str] = "mlp.gate"
    interleaved: ClassVar[bool] = False  # as gpt-oss stacks experts, which have biases: see `expert_views`
    gguf_experts: ClassVar[Mapping[str, str]] = {
        "mlp.gate": "ffn_gate_inp",
        **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    }
    gguf_keys: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "num_experts": ("expert_count",),
        "num_experts_per_tok": ("expert_used_count",),
        "moe_intermediate_size": ("expert_feed_forward_length",),
    }

    @classmethod
    def mlp_shapes(cls, config: Any, at: str) -> Shapes:
        c = config
        if at not in cls.mixture_layers(c):
            return super().mlp_shapes(c, at)
        into = (c.expert_size, c.hidden_size)
        expert = {"gate_proj": into, "up_proj": into, "down_proj": into[::-1]}
        shapes = matrices(at, {cls.router: (c.num_experts, c.hidden_size)}, cls.interleaved)
        for e in range(c.num_experts):
            shapes |= matrices(f"{at}.mlp.experts.{e}", expert, cls.interleaved)
        return shapes

    @classmethod
    def read_mlp(cls, reader: WeightReader, at: str) -> dict[str, Any]:
        if f"{at}.{cls.router}.weight" not in reader.shapes:
            return super().read_mlp(reader, at)
        return {"experts": cls.read_experts(reader, at)}

    @classmethod
    def mixture_layers(cls, config: Any) -> list[str]:
        """The layers with experts, by the beginning of their tensors' names."""
        return [f"model.layers.{i}" for i in config.mixtures]

    @classmethod
    def views(cls, config: Any) -> dict[str, View]:
        layers = (expert_views(config, at, cls.interleaved) for at in cls.mixture_layers(config))
        return {name: view for views in layers for name, view in views.items()}

    @classmethod
    def read_experts(cls, reader: WeightReader, at: str) -> ExpertWeights:
        c, router = reader.config, f"{at}.{cls.router}"

        def modules(*parts: str) -> list[list[str]]:
            return [[f"{at}.mlp.experts.{e}.{part}_proj" for part in parts] for e in range(c.num_experts)]

        def biases(experts: list[list[str]]) -> Tensor | None:
            whole = reader.biases([m for e in experts for m in e], f"{experts[0][0]}.bias" in reader.shapes)
            return None if whole is None else whole.view(c.num_experts, -1)

        gate_up, down = modules("gate", "up"), modules("down")
        return ExpertWeights(
            router=reader.matrix(router),
            router_bias=reader.biases([router], f"{router}.bias" in reader.shapes),
            gate_up=_stacked(reader, gate_up),
            gate_up_bias=biases(gate_up),
            down=_stacked(reader, down),
            down_bias=biases(down),
            top_k=c.top_k,
            normalize=c.normalize,
            limit=c.limit,
        )


class Qwen3Moe(Mixture, Llama):
    """The decoder of Qwen3-MoE."""

    gguf_names: ClassVar[Mapping[str, str]] = {**Llama.gguf_names, **Mixture.gguf_experts}

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        base = base_config({**raw, "max_window_layers": 0, "layer_types": None}, where, qk_norm=True)  # all slide
        only, step = raw.get("mlp_only_layers") or (), whole_number(raw, where, "decoder_sparse_step", 1)
        dense = {i for i in range(base.num_layers) if i in only or (i + 1) % step}
        normalize = bool(raw.get("norm_topk_prob", False))
        return with_experts(MoeConfig, base, raw, where, normalize=normalize, dense_layers=frozenset(dense))

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        layers = range(raw["num_hidden_layers"])
        dense = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors]
        return super().gguf_config(file, raw) | {"norm_topk_prob": True, "mlp_only_layers": dense}


def expert_views(c: MoeConfig, at: str, interleaved: bool = False) -> dict[str, View]:
    """Where the experts of this layer are in stacked tensors: rows of the gate before those of up.

    `interleaved`: as in gpt-oss, rows of both take turns, inputs come before outputs, and there are biases.
    """
    size, found = c.expert_size, dict[str, View]()
    gate, up = (slice(0, size), slice(size, 2 * size)) if not interleaved else (slice(0, None, 2), slice(1, None, 2))
    for part, rows in {"gate": gate, "up": up, "down": slice(None)}.items():
        down = part == "down"
        height, width = (c.hidden_size, size) if down else (2 * size, c.hidden_size)
        stacked = f"{at}.mlp.experts.{'down' if down else 'gate_up'}_proj"
        shape = (c.num_experts, width, height) if interleaved else (c.num_experts, height, width)
        for e in range(c.num_experts):
            one = f"{at}.mlp.experts.{e}.{part}_proj"
            found[f"{one}.weight"] = View(stacked, shape, e, rows, interleaved)
            if interleaved:
                found[f"{one}.bias"] = View(f"{stacked}_bias", (c.num_experts, height), e, rows)
    return found


def _stacked(reader: WeightReader, experts: Seq[Seq[str]]) -> tuple[QuantTensor, ...]:
    """The matrix of each expert, whose modules are joined: views of one memory where its rows fill whole blocks."""
    names = [m for modules in experts for m in modules]
    height = sum(reader.shapes[f"{m}.weight"][0] for m in experts[0])
    if height % BLOCK_OUTPUTS == 0 and all(reader.source.in_parts(f"{m}.weight") for m in names):
        whole = reader.stack(names)
        if isinstance(whole, QuantTensor):
            return parted(whole, len(experts)) or ()
    found = [reader.stack(modules) for modules in experts]
    mixed = next((i for i, w in enumerate(found) if isinstance(w, tuple)), None)
    if mixed is not None:
        raise ConfigError(f"{' and '.join(experts[mixed])} are in different formats; give both the same one")
    return tuple(w for w in found if isinstance(w, QuantTensor))
