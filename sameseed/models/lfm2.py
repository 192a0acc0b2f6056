"""LFM2 and LFM2.5: most layers are short gated convolutions, the others Qwen3's attention; Llama's around them.

A convolution sees a few tokens. What it keeps of a sequence are its latest inputs, in the log of kvcache/state.py. In
models with experts, these stand in place of the MLP from some layer on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from sameseed.batch import Batch
from sameseed.errors import ModelLoadError
from sameseed.models.config import ModelConfig, base_config, matrices, one_of, positive_number, whole_number
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.llama import Llama
from sameseed.models.qwen3_moe import Mixture, MoeConfig, with_experts
from sameseed.models.weights import Shapes, WeightReader
from sameseed.ops import ExpertWeights, Ops, RowSource, StateLayer, plain_rows

KINDS = ("conv", "full_attention")
MODULES = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    **{f"self_attn.{n}_norm": f"self_attn.{n}_layernorm" for n in "qk"},
    **{f"mlp.{n}_proj": f"feed_forward.{w}" for n, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
}  # fmt: skip


@dataclass(frozen=True)
class Lfm2Config(ModelConfig):
    """`taps`: tokens that a convolution sees, the row's own included."""

    taps: int = 3

    @property
    def state_shapes(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        return (((0,), self.hidden_size),) * len(self.recurrent)


class Lfm2(Llama):
    """The decoder of LFM2. Of a convolution, `qkv` makes gates and values [3 C, C]; `mixer` [taps, C] weighs them."""

    config: Lfm2Config
    by_layer: ClassVar[bool] = True
    last_norm: ClassVar[str] = "model.embedding_norm"
    modules = MODULES
    gguf_names: ClassVar[Mapping[str, str]] = {
        **{MODULES.get(n, n): name for n, name in Llama.gguf_names.items() if n != "model.norm"},
        **{f"conv.{n}": f"shortconv.{n}" for n in ("in_proj", "conv", "out_proj")},
        "model.embedding_norm": "token_embd_norm",
    }
    gguf_keys: ClassVar[Mapping[str, tuple[Any, ...]]] = {"conv_L_cache": ("shortconv.l_cache",)}

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        whole = partial(whole_number, raw, where)
        inner = whole("intermediate_size" if raw.get("block_ff_dim") is None else "block_ff_dim")
        if raw.get("block_auto_adjust_ff_dim", True):
            inner, unit = 2 * inner // 3, whole("block_multiple_of", 256)
            inner = -(-int(inner * positive_number(raw, "block_ffn_dim_multiplier", 1.0, where)) // unit) * unit
        own = {
            "intermediate_size": inner,
            "rms_norm_eps": raw.get("norm_eps", raw.get("rms_norm_eps", 1e-5)),
            "tie_word_embeddings": raw.get("tie_embedding", raw["tie_word_embeddings"]),
            "sliding_window": None,
        }
        base = base_config({**raw, **own}, where, qk_norm=True)
        attention, kinds = raw.get("full_attn_idxs"), raw.get("layer_types")
        if not isinstance(kinds, list):
            attention = attention if isinstance(attention, list) else range(base.num_layers)
            kinds = [KINDS[i in attention] for i in range(base.num_layers)]
        recurrent = frozenset(i for i, kind in enumerate(kinds) if kind == KINDS[0])
        if len(kinds) != base.num_layers or any(k not in KINDS for k in kinds) or KINDS[1] not in kinds:
            raise ModelLoadError(f"{where}: layer_types must name conv or full_attention for each layer, both kinds")
        one_of(raw.get("conv_bias"), (None, False), f"{where}: conv_bias")
        return Lfm2Config(**vars(replace(base, recurrent=recurrent)), taps=whole("conv_L_cache", 3, most=8))

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        more = super().gguf_config(file, raw)
        if heads := file.by_layer("attention.head_count_kv"):  # a convolution has none
            more["num_key_value_heads"] = max(heads)
            more["layer_types"] = [KINDS[bool(count)] for count in heads]
        return more | {"block_auto_adjust_ff_dim": False}

    @classmethod
    def layer_shapes(cls, config: Lfm2Config, layer: int) -> Shapes:
        c, at, wide, shapes = config, f"model.layers.{layer}", config.hidden_size, dict[str, tuple[int, ...]]()
        if layer in c.recurrent:
            conv = {"in_proj": (3 * wide, wide), "conv": (wide, 1, c.taps), "out_proj": (wide, wide)}
            shapes = matrices(f"{at}.conv", conv)
        for name, shape in super().layer_shapes(c, layer).items():
            module, _, kind = name.removeprefix(f"{at}.").rpartition(".")
            if layer not in c.recurrent or not module.startswith("self_attn"):
                shapes[f"{at}.{MODULES.get(module, module)}.{kind}"] = shape
        return shapes

    @classmethod
    def read_mixer(cls, reader: WeightReader, layer: int) -> dict[str, Any]:
        c, at = reader.config, f"model.layers.{layer}"
        if layer not in c.recurrent:
            return super().read_mixer(reader, layer)
        return {
            "input_norm": reader.norm(f"{at}.operator_norm"),
            "qkv": reader.matrix(f"{at}.conv.in_proj"),
            "mixer": reader.vector(f"{at}.conv.conv.weight").view(-1, c.taps).T.contiguous(),
            "o": reader.matrix(f"{at}.conv.out_proj"),
            "post_norm": reader.norm(f"{at}.ffn_norm"),
        }

    def _mixed(self, ops: Ops, w: Any, rows: RowSource, state: StateLayer, batch: Batch) -> RowSource:
        return plain_rows(ops.conv(ops.product(rows, w.qkv), w.mixer, state, batch))


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
        dense = frozenset(range(whole_number(raw, where, "num_dense_layers", 2, least=0, most=base.num_layers - 1)))
        normalize = bool(raw.get("norm_topk_prob", True))
        factor = positive_number(raw, "routed_scaling_factor", 1.0, where)
        return with_experts(Lfm2MoeConfig, base, raw, where, normalize=normalize, dense_layers=dense, factor=factor)

    @classmethod
    def mlp_shapes(cls, config: Any, at: str) -> Shapes:
        bias = {f"{at}.feed_forward.expert_bias": (config.num_experts,)} if at in cls.mixture_layers(config) else {}
        return {**super().mlp_shapes(config, at), **bias}

    @classmethod
    def read_experts(cls, reader: WeightReader, at: str) -> ExpertWeights:
        bias = reader.vector(f"{at}.feed_forward.expert_bias")
        return replace(super().read_experts(reader, at), chosen_by=bias, factor=reader.config.factor)
