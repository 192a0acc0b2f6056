"""Qwen3.5, 3.6 and 3.8: of four layers, three are Gated DeltaNet (Yang et al., 2024) and one is gated attention.

A DeltaNet layer keeps a state of fixed size per sequence instead of keys and values (kvcache/state.py). The attention
rotates only the first quarter of a head, and multiplies its output by the sigmoid of a gate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor

from sameseed.batch import Batch
from sameseed.errors import ModelLoadError
from sameseed.kvcache.cache import KVCache
from sameseed.models.config import ModelConfig, base_config, family, layer_shapes, whole_number
from sameseed.models.decoder import Decoder, state_layers
from sameseed.models.layers import LayerWeights, Weights, rotary_columns, rotary_order
from sameseed.ops import DeltaWeights, Ops, RowSource, Then, gated_rows, normed_rows, plain_rows
from sameseed.scheme import KVLayer, QuantTensor

if TYPE_CHECKING:
    from sameseed.models.gguf.header import GGUFFile
    from sameseed.models.weights import Shapes, WeightReader

INTERVAL = 4  # every fourth layer has attention, where config.json does not say
OWN_ENDS = ("embed_tokens", "shared_head_head")  # that the MTP block may have in GGUF; it takes the target's
PARTS = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))


@dataclass(frozen=True)
class Qwen35Config(ModelConfig):
    """`attends[i]`: whether layer i is attention.

    Of DeltaNet: heads Hk and H, their sizes K and D, and `taps`, the columns of the convolution. `in_gguf`: tensors are
    stored as GGUF does. `num_mtp`: layers of the MTP block in the checkpoint; `reads_mtp`: its tensors are among those
    that are read.
    """

    attends: tuple[bool, ...] = ()
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    taps: int = 4
    in_gguf: bool = False
    num_mtp: int = 0
    reads_mtp: bool = False

    @property
    def mixed(self) -> int:
        """Channels of q, k and v together in a DeltaNet layer."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        return ((self.num_kv_heads, self.head_dim),) * sum(self.attends)

    @property
    def state_shapes(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        one = (self.value_heads, self.key_dim, self.value_dim), self.mixed + 2 * self.value_heads
        return (one,) * (self.num_layers - sum(self.attends))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in member(self).shapes(self).values() if len(shape) == 2)


@dataclass(frozen=True)
class DeltaLayer(Weights):
    """Weights of a DeltaNet layer with its feed-forward network; `qkv` also makes z, b and a."""

    input_norm: Tensor  # [C]
    qkv: QuantTensor | tuple[QuantTensor, ...]
    delta: DeltaWeights
    out: QuantTensor  # [C, H D]
    post_norm: Tensor  # [C]
    gate_up: QuantTensor | tuple[QuantTensor, ...]  # [2 I, C]
    down: QuantTensor  # [C, I]
    mixture: Any = None  # experts beside these (qwen35_moe.py)


@dataclass(frozen=True, kw_only=True)
class GatedLayer(LayerWeights):
    """An attention layer; the rows of `qkv` hold q and a gate, one head after the other, then k, then v."""

    mixture: Any = None  # as in DeltaLayer


def gated_attention(
    ops: Ops,
    c: ModelConfig,
    w: GatedLayer,
    rows: RowSource,
    residual: Tensor,
    batch: Batch,
    kv: KVLayer,
    rope: Tensor,
    then: Then | None,
) -> Tensor:
    """Run a layer of gated attention; arguments and result as of `run_layer`."""
    heads, dim = c.num_heads, c.head_dim
    assert w.q_norm is not None and w.k_norm is not None and w.columns is not None
    qkv = ops.product(rows, w.qkv)  # [T, (2 H + 2 Hk) D]
    own = ops.take(qkv, w.columns)
    q = ops.rope_store(own, heads, kv, batch, rope, (w.q_norm, w.k_norm), c.rms_eps)  # [T, H, D]
    out = ops.attention(q, kv, batch, dim**-0.5).view(-1, heads * dim)
    gated = ops.gate(out, qkv[:, : 2 * heads * dim], heads)
    x = ops.product(plain_rows(gated), w.o, None, residual, Then(w.post_norm, c.rms_eps, w.gate_up))
    return feed_forward(ops, c, w, x, then)


def feed_forward(ops: Ops, c: ModelConfig, w: GatedLayer | DeltaLayer, x: Tensor, then: Then | None) -> Tensor:
    """x [T, C] plus the layer's feed-forward network of it."""
    if w.mixture is not None:
        mixed: Tensor = w.mixture.run(ops, c, w, x)
        return mixed
    gate_up = ops.product(normed_rows(x, w.post_norm, c.rms_eps), w.gate_up)  # [T, 2 I]
    return ops.product(gated_rows(gate_up), w.down, None, x, then)


class Qwen35(Decoder):
    """The decoder of Qwen3.5, 3.6 and 3.8."""

    config: Qwen35Config
    rotates_all: ClassVar[bool] = False
    gguf_names: ClassVar[Mapping[str, str]] = {
        **Decoder.gguf_names,
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
        return Qwen35Config(
            **vars(base) | {"norm_shift": 0.0 if raw.get("in_gguf") else 1.0},
            attends=tuple(kind == "full_attention" for kind in kinds),
            **heads,
            **dims,
            taps=whole("linear_conv_kernel_dim", 4, most=8),
            in_gguf=bool(raw.get("in_gguf")),
            num_mtp=whole("mtp_num_hidden_layers", 0, least=0, most=1),
        )

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        layers, mtp, dim = file.number("block_count"), file.number("nextn_predict_layers", 0), raw["head_dim"]
        inner, heads = file.number("ssm.inner_size"), file.number("ssm.time_step_rank")
        found: dict[str, Any] = {
            "in_gguf": True,
            "num_hidden_layers": layers - mtp,
            "mtp_num_hidden_layers": mtp,
            "rope_parameters": {
                **raw["rope_parameters"],
                "partial_rotary_factor": file.number("rope.dimension_count", dim) / dim,
            },
            "linear_conv_kernel_dim": file.number("ssm.conv_kernel"),
            "linear_key_head_dim": file.number("ssm.state_size"),
            "linear_value_head_dim": inner // heads if heads and not inner % heads else 0,
            "linear_num_key_heads": file.number("ssm.group_count"),
            "linear_num_value_heads": heads,
        }
        recurrent = file.metadata.get(f"{file.metadata['general.architecture']}.attention.recurrent_layers")
        if recurrent is not None:
            names = ("full_attention", "linear_attention")
            found["layer_types"] = [names[bool(r)] for r in list(recurrent)[: layers - mtp]]
        return found | {"full_attention_interval": file.number("full_attention_interval", INTERVAL)}

    @classmethod
    def shapes(cls, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        assert isinstance(config, Qwen35Config)
        return super().shapes(config) | (mtp_shapes(config) if config.reads_mtp else {})

    @classmethod
    def layer_shapes(cls, config: ModelConfig, layer: int) -> Shapes:
        assert isinstance(config, Qwen35Config)
        at = f"model.layers.{layer}"
        if config.attends[layer]:
            return attention_shapes(config, at)
        c, values = config, config.value_heads * config.value_dim
        norms = {f"{at}.{n}.weight": (c.hidden_size,) for n in cls.norms}
        outputs = dict(zip(PARTS, (c.mixed, values, c.value_heads, c.value_heads), strict=True))
        return {
            **norms,
            **cls.mlp_shapes(c, at),
            **{f"{at}.{part}.weight": (rows, c.hidden_size) for part, rows in outputs.items()},
            f"{at}.linear_attn.out_proj.weight": (c.hidden_size, values),
            f"{at}.linear_attn.conv1d.weight": (c.mixed, 1, c.taps),
            f"{at}.linear_attn.A_log": (c.value_heads,),
            f"{at}.linear_attn.dt_bias": (c.value_heads,),
            f"{at}.linear_attn.norm.weight": (c.value_dim,),
        }

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, at: str) -> Shapes:
        """Of the feed-forward network of the layer whose tensors' names begin with `at`."""
        return {n: s for n, s in layer_shapes(config, at, ()).items() if ".mlp." in n}

    @classmethod
    def read_mlp(cls, reader: WeightReader, at: str, name: str = "mlp") -> dict[str, Any]:
        """The feed-forward network of a layer as its fields."""
        gate_up = reader.stack([f"{at}.{name}.gate_proj", f"{at}.{name}.up_proj"])
        return {"gate_up": gate_up, "down": reader.matrix(f"{at}.{name}.down_proj")}

    @classmethod
    def spare(cls, config: ModelConfig) -> Seq[str]:
        assert isinstance(config, Qwen35Config)
        ends = [f"model.layers.{config.num_layers}.nextn.{name}.weight" for name in OWN_ENDS if config.in_gguf]
        return (*(() if config.reads_mtp else mtp_shapes(config)), *ends) if config.num_mtp else ()

    @classmethod
    def read_layer(cls, reader: WeightReader, layer: int) -> GatedLayer | DeltaLayer:
        c, at = reader.config, f"model.layers.{layer}"
        assert isinstance(c, Qwen35Config)
        if c.attends[layer]:
            return read_attention(reader, c, at)
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
        return DeltaLayer(
            input_norm=reader.norm(f"{at}.input_layernorm"),
            qkv=reader.stack([f"{at}.{part}" for part in PARTS]),
            delta=delta,
            out=reader.matrix(f"{linear}.out_proj"),
            post_norm=reader.norm(f"{at}.post_attention_layernorm"),
            **cls.read_mlp(reader, at),
        )

    def _states(self, ops: Ops, batch: Batch, cache: KVCache) -> Iterator[Tensor]:
        c, w, eps = self.config, self.weights, self.config.rms_eps
        caches, states = iter(cache.layers), iter(state_layers(cache))
        x = ops.embedding(batch.token_ids, w.embedding)  # [T, C]
        for i, layer in enumerate(w.layers):
            rows = normed_rows(x, layer.input_norm, eps)
            following = w.layers[i + 1] if i + 1 < len(w.layers) else None
            then = None if following is None else Then(following.input_norm, eps, following.qkv)
            if c.attends[i]:
                x = gated_attention(ops, c, layer, rows, x, batch, next(caches), self.rope, then)
            else:
                y = ops.delta(ops.product(rows, layer.qkv), layer.delta, next(states), batch)
                x = ops.product(gated_rows(y), layer.out, None, x, Then(layer.post_norm, eps, layer.gate_up))
                x = feed_forward(ops, c, layer, x, then)
            yield x


def member(c: ModelConfig) -> type[Qwen35]:
    """The class of a model of this family."""
    return cast(type[Qwen35], family(c.architecture))


def attention_shapes(c: ModelConfig, at: str) -> Shapes:
    """Shapes of the tensors of an attention layer whose names begin with `at`."""
    shapes = {n: s for n, s in layer_shapes(c, at, Qwen35.norms).items() if ".mlp." not in n}
    rows, columns = shapes[f"{at}.self_attn.q_proj.weight"]
    return {**shapes, **member(c).mlp_shapes(c, at), f"{at}.self_attn.q_proj.weight": (2 * rows, columns)}


def read_attention(reader: WeightReader, c: Qwen35Config, at: str) -> GatedLayer:
    """The attention layer whose module names begin with `at`."""
    order = rotary_order(c.head_dim, c.rope.rotary_dim or c.head_dim).to(reader.device)
    layer = reader.attention(at) | {"columns": rotary_columns(c, 2 * c.head_dim).to(reader.device)}
    layer |= {n: layer[n][order].contiguous() for n in ("q_norm", "k_norm")}
    return GatedLayer(**layer, **member(c).read_mlp(reader, at))


def mtp_shapes(c: Qwen35Config) -> dict[str, tuple[int, ...]]:
    """The tensors of the MTP block, by the names of its container."""
    hidden = (c.hidden_size,)
    fc, embedding, states, norm, at = mtp_names(c)
    shapes = {f"{fc}.weight": (c.hidden_size, 2 * c.hidden_size)}
    return shapes | {f"{n}.weight": hidden for n in (embedding, states, norm)} | dict(attention_shapes(c, at))


def mtp_names(c: Qwen35Config) -> tuple[str, str, str, str, str]:
    """Modules of the MTP block: product, norms of embedding, of states and of the output, and its layer."""
    at = f"model.layers.{c.num_layers}"
    if c.in_gguf:
        near = f"{at}.nextn"
        return f"{near}.eh_proj", f"{near}.enorm", f"{near}.hnorm", f"{near}.shared_head_norm", at
    return "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0"


MODEL = Qwen35
