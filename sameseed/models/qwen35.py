"""Qwen3.5, 3.6 and 3.8: of four layers, three are Gated DeltaNet (Yang et al., 2024) and one is gated attention.

A DeltaNet layer keeps a state of fixed size per sequence instead of keys and values (kvcache/state.py). The attention
rotates only the first quarter of a head, and multiplies its output by the sigmoid of a gate. In models with experts,
each layer also has a shared expert with a gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch

from sameseed.batch import Batch
from sameseed.errors import ModelLoadError
from sameseed.models.config import ModelConfig, base_config, family, layer_shapes, matrices, mlp_shapes, whole_number
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.layers import SharedGate
from sameseed.models.llama import Llama
from sameseed.models.qwen3_moe import Mixture, MoeConfig, expert_views, with_experts
from sameseed.models.weights import Shapes, WeightReader
from sameseed.ops import DeltaWeights, Ops, RowSource, StateLayer, gated_rows
from sameseed.scheme import QuantScheme

INTERVAL = 4  # every fourth layer has attention, where config.json does not say
OWN_ENDS = ("embed_tokens", "shared_head_head")  # that the MTP block may have in GGUF; it takes the target's
PARTS = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))


@dataclass(frozen=True)
class Qwen35Config(ModelConfig):
    """Of DeltaNet: heads Hk and H, their sizes K and D, and `taps`, the columns of the convolution.

    `in_gguf`: tensors are stored as GGUF does. `num_mtp`: layers of the MTP block in the checkpoint.
    """

    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    taps: int = 4
    in_gguf: bool = False
    num_mtp: int = 0

    @property
    def mixed(self) -> int:
        """Channels of q, k and v together in a DeltaNet layer."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_shapes(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        one = (self.value_heads, self.key_dim, self.value_dim), self.mixed + 2 * self.value_heads
        return (one,) * len(self.recurrent)


class Qwen35(Llama):
    """The decoder of Qwen3.5, 3.6 and 3.8. Of a DeltaNet layer, `qkv` also makes z, b and a for its `mixer`."""

    config: Qwen35Config
    rotates_all: ClassVar[bool] = False
    gguf_names: ClassVar[Mapping[str, str]] = {
        **Llama.gguf_names,
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        **{f"nextn.{name}": f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm", *OWN_ENDS)},
    }
    gguf_keys: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mtp_num_hidden_layers": ("nextn_predict_layers", 0),
        "full_attention_interval": ("full_attention_interval", INTERVAL),
        "linear_conv_kernel_dim": ("ssm.conv_kernel",),
        "linear_key_head_dim": ("ssm.state_size",),
        "linear_num_key_heads": ("ssm.group_count",),
        "linear_num_value_heads": ("ssm.time_step_rank",),
    }

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> Qwen35Config:
        base = base_config({**raw, "use_sliding_window": False}, where, qk_norm=True, rotates=0.25)
        whole = partial(whole_number, raw, where)
        interval, kinds = whole("full_attention_interval", INTERVAL), raw.get("layer_types")
        if not isinstance(kinds, list):
            kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(base.num_layers)]
        if len(kinds) != base.num_layers or set(kinds) - {"linear_attention", "full_attention"}:
            raise ModelLoadError(f"{where}: layer_types must name linear_attention or full_attention for each layer")
        heads: dict[str, Any] = {name: whole(f"linear_num_{name}") for name in ("key_heads", "value_heads")}
        dims: dict[str, Any] = {f"{part}_dim": whole(f"linear_{part}_head_dim", 128) for part in ("key", "value")}
        if heads["value_heads"] % heads["key_heads"] or base.qkv_bias:
            raise ModelLoadError(f"{where}: {heads} or biases of attention are no Qwen3.5; download it again")
        recurrent = frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention")
        shift = 0.0 if raw.get("in_gguf") else 1.0
        base = replace(base, norm_shift=shift, recurrent=recurrent, gated=True)
        return Qwen35Config(
            **vars(base),
            **heads,
            **dims,
            taps=whole("linear_conv_kernel_dim", 4, most=8),
            in_gguf=bool(raw.get("in_gguf")),
            num_mtp=whole("mtp_num_hidden_layers", 0, least=0, most=1),
        )

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().gguf_config(file, raw)
        layers, heads = raw["num_hidden_layers"] - found["mtp_num_hidden_layers"], found["linear_num_value_heads"]
        inner = file.number("ssm.inner_size")
        found |= {
            "in_gguf": True,
            "num_hidden_layers": layers,
            "linear_value_head_dim": inner // heads if heads and not inner % heads else 0,
        }
        if recurrent := file.by_layer("attention.recurrent_layers"):
            found["layer_types"] = [("full_attention", "linear_attention")[bool(r)] for r in recurrent[:layers]]
        return found

    @classmethod
    def layer_shapes(cls, config: Qwen35Config, layer: int) -> Shapes:
        at = f"model.layers.{layer}"
        if layer not in config.recurrent:
            return super().layer_shapes(config, layer)
        c, values = config, config.value_heads * config.value_dim
        outputs = dict(zip(PARTS, (c.mixed, values, c.value_heads, c.value_heads), strict=True))
        return {
            **{f"{at}.{n}.weight": (c.hidden_size,) for n in cls.norms},
            **cls.mlp_shapes(c, at),
            **matrices(at, {part: (rows, c.hidden_size) for part, rows in outputs.items()}),
            f"{at}.linear_attn.out_proj.weight": (c.hidden_size, values),
            f"{at}.linear_attn.conv1d.weight": (c.mixed, 1, c.taps),
            f"{at}.linear_attn.A_log": (c.value_heads,),
            f"{at}.linear_attn.dt_bias": (c.value_heads,),
            f"{at}.linear_attn.norm.weight": (c.value_dim,),
        }

    @classmethod
    def spare(cls, config: Qwen35Config) -> Seq[str]:
        ends = [f"model.layers.{config.num_layers}.nextn.{name}.weight" for name in OWN_ENDS if config.in_gguf]
        return (*mtp_shapes(config), *ends) if config.num_mtp else ()

    @classmethod
    def read_mixer(cls, reader: WeightReader, layer: int) -> dict[str, Any]:
        c, at = reader.config, f"model.layers.{layer}"
        if layer not in c.recurrent:
            return super().read_mixer(reader, layer)
        linear = f"{at}.linear_attn"
        decay = reader.vector(f"{linear}.A_log")
        delta = DeltaWeights(
            conv=reader.vector(f"{linear}.conv1d.weight").view(c.mixed, c.taps).T.contiguous(),
            decay=decay if c.in_gguf else -decay.exp(),
            bias=reader.vector(f"{linear}.dt_bias"),
            norm=reader.vector(f"{linear}.norm.weight"),
            eps=c.rms_eps,
            tiled=c.in_gguf,
        )
        return {
            "input_norm": reader.norm(f"{at}.input_layernorm"),
            "qkv": reader.stack([f"{at}.{part}" for part in PARTS]),
            "mixer": delta,
            "o": reader.matrix(f"{linear}.out_proj"),
            "post_norm": reader.norm(f"{at}.post_attention_layernorm"),
        }

    def _mixed(self, ops: Ops, w: Any, rows: RowSource, state: StateLayer, batch: Batch) -> RowSource:
        return gated_rows(ops.delta(ops.product(rows, w.qkv), w.mixer, state, batch))


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
        return {**super().mlp_shapes(config, at), **mlp_shapes(config, f"{at}.{SHARED}"), **gate}

    @classmethod
    def mixture_layers(cls, config: Any) -> list[str]:
        return [*super().mixture_layers(config), mtp_names(config)[-1]]

    @classmethod
    def spare(cls, config: Any) -> Seq[str]:
        views = {} if config.in_gguf else expert_views(config, mtp_names(config)[-1])
        return (*super().spare(config), *{view.tensor for view in views.values()})

    @classmethod
    def read_mlp(cls, reader: WeightReader, at: str) -> dict[str, Any]:
        size, device = reader.config.intermediate_size, reader.device
        columns = torch.arange(size, 2 * size, dtype=torch.int32, device=device)
        gate = reader.encode(reader.vector(f"{at}.{GATE}.weight").view(1, -1), QuantScheme("fp32"))
        shared = SharedGate(gate, columns, torch.zeros_like(columns))
        return {**reader.mlp(at, SHARED), **super().read_mlp(reader, at), "shared": shared}


def member(c: ModelConfig) -> type[Qwen35]:
    """The class of a model of this family."""
    return cast(type[Qwen35], family(c.architecture))


def mtp_shapes(c: Qwen35Config) -> dict[str, tuple[int, ...]]:
    """The tensors of the MTP block, by the names of its container."""
    cls, hidden = member(c), (c.hidden_size,)
    fc, embedding, states, norm, at = mtp_names(c)
    layer = layer_shapes(c, at, cls.norms, feed_forward=cls.mlp_shapes(c, at))
    norms = {f"{n}.weight": hidden for n in (embedding, states, norm)}
    return {f"{fc}.weight": (c.hidden_size, 2 * c.hidden_size), **norms, **layer}


def mtp_names(c: Qwen35Config) -> tuple[str, str, str, str, str]:
    """Modules of the MTP block: product, norms of embedding, of states and of the output, and its layer."""
    at = f"model.layers.{c.num_layers}"
    if c.in_gguf:
        near = f"{at}.nextn"
        return f"{near}.eh_proj", f"{near}.enorm", f"{near}.hnorm", f"{near}.shared_head_norm", at
    return "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0"
