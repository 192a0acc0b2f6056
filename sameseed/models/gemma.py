"""Gemma 3 and 4: norms before and after each half of a layer; most layers have a window and their own rotary base.

Gemma 4 has larger heads in layers that see all tokens, whose values may be their keys. Its last layers may read the
cache of an earlier layer, and the E models add an embedding of the token to each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.errors import ModelLoadError
from sameseed.kvcache.cache import KVCache
from sameseed.models.config import ModelConfig, RopeConfig, base_config, family, layer_shapes, one_of, whole_number
from sameseed.models.decoder import Decoder
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.layers import LayerWeights, ModelWeights, rope_table
from sameseed.models.weights import Shapes, WeightReader
from sameseed.ops import Ops, RowSource, gated_rows, normed_rows, plain_rows
from sameseed.scheme import KVLayer, QuantTensor

GELU = ("gelu_pytorch_tanh", "gelu_tanh")
PATTERN = 6  # every sixth layer sees all tokens, where config.json does not name the layers
SLIDING, FULL = "sliding_attention", "full_attention"
# Of other models with the same architectures.
UNREAD = ("attn_logit_softcapping", "use_bidirectional_attention")


@dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """`rope`, `head_dim` and `num_kv_heads` are those of layers that see all tokens, `local_...` of the others.

    `scale`: of attention scores; `softcap`: of logits, 0 for none. `keys_are_values`: in layers that see all tokens.
    `num_shared`: last layers, which read the cache of the last layer of their kind before them; `wide`: their
    feed-forward network has twice the size. `per_layer`: values that each layer adds by token, 0 for none.
    """

    local_rope: RopeConfig = field(default_factory=RopeConfig)
    local_head_dim: int = 0
    local_kv_heads: int = 0
    scale: float = 1.0
    softcap: float = 0.0
    keys_are_values: bool = False
    num_shared: int = 0
    wide: bool = False
    per_layer: int = 0
    per_layer_vocab: int = 0

    @property
    def is_fourth(self) -> bool:
        return self.architecture.startswith("Gemma4")

    @cached_property
    def layers(self) -> tuple[ModelConfig, ...]:
        """Each layer with its own sizes."""
        local = replace(self, head_dim=self.local_head_dim, num_kv_heads=self.local_kv_heads)
        sized = [self if window is None else local for window in self.windows]
        inner = 2 * self.intermediate_size if self.wide else self.intermediate_size
        first = self.num_layers - self.num_shared
        return tuple(c if i < first else replace(c, intermediate_size=inner) for i, c in enumerate(sized))

    @cached_property
    def caches(self) -> tuple[int, ...]:
        """The layer of the cache that each layer reads; the first ones write it."""
        first = self.num_layers - self.num_shared
        last = {window: i for i, window in enumerate(self.windows[:first])}
        return tuple(i if i < first else last[window] for i, window in enumerate(self.windows))

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((c.num_kv_heads, c.head_dim) for c in self.layers[: self.num_layers - self.num_shared])

    @property
    def _looked_up(self) -> int:
        """Number of weights in the embedding for all layers: a pass reads a row of it for each token."""
        return self.per_layer_vocab * self.num_layers * self.per_layer

    @property
    def row_parameters(self) -> int:
        return super().row_parameters - self._looked_up

    def read_share(self, rows: float, batch: float = 1.0) -> float:
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return 1 - self._looked_up / (self.num_parameters - embedding)


@dataclass(frozen=True)
class GemmaLayer(LayerWeights):
    """`post_norm` comes before the feed-forward network; `..._out` are norms [C] of what a part of the layer adds."""

    attention_out: Tensor
    feedforward_out: Tensor
    v_norm: Tensor | None = None  # [D]
    factor: float = 1.0  # of the layer's output
    input_gate: QuantTensor | None = None  # [P, C]
    input_up: QuantTensor | None = None  # [C, P]
    input_out: Tensor | None = None


@dataclass(frozen=True)
class GemmaWeights(ModelWeights):
    """Of E models: embeddings for all layers [V, L P], and a projection of the usual one to [L P], normed by P."""

    layer_embedding: QuantTensor | None = None
    layer_projection: QuantTensor | None = None
    layer_norm: Tensor | None = None


class Gemma(Decoder):
    """The decoder of Gemma 3 and 4."""

    config: GemmaConfig
    by_layer = True
    norms: ClassVar = tuple(
        f"{n}_layernorm" for n in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    gguf_names: ClassVar = {
        **Decoder.gguf_names,
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "layer_scalar": "layer_output_scale.weight",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
        **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
    }
    gguf_keys: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "sliding_window": ("attention.sliding_window", 0),
        "rope_local_base_freq": ("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": ("final_logit_softcapping", 0.0),
    }

    # --- config ---

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> GemmaConfig:
        if raw.get("enable_moe_block"):
            return family("Gemma4MoeForCausalLM").parse({**raw, "enable_moe_block": False}, where)  # type: ignore[return-value]
        for name in UNREAD:
            one_of(raw.get(name), (None, False, "vision"), f"{where}: {name}")  # text is causal where images are not
        fourth = str(raw["architectures"][0]).startswith("Gemma4")
        raw = {k: v for k, v in raw.items() if v is not None}
        raw["hidden_act"] = raw["hidden_activation"]
        raw["layer_types"] = kinds = _layer_types(raw, fourth)
        overrides = list((raw.get("per_layer_config") or {}).values())  # as newer files name the sizes of full layers
        wide = {**raw, **(overrides[0] if overrides and isinstance(overrides[0], dict) else {})}
        if fourth and not overrides:
            wide["head_dim"] = whole_number(raw, where, "global_head_dim", 512, most=4096)
            if raw.get("attention_k_eq_v"):
                wide["num_key_value_heads"] = raw.get("num_global_key_value_heads", raw.get("num_key_value_heads"))
        read = partial(base_config, where=where, qk_norm=True, act=GELU)
        full, local = _ropes(raw, fourth, wide["head_dim"])
        base, small = (read({**c, "rope_parameters": r, "rope_scaling": None}) for c, r in ((wide, full), (raw, local)))
        shift = 0.0 if fourth or raw.get("norms_stored_whole") else 1.0
        whole = partial(whole_number, raw, where)
        shared = whole("num_kv_shared_layers", 0, least=0)
        first = base.num_layers - shared
        if shared > base.num_layers or not set(kinds[first:]) <= set(kinds[:first]):
            raise ModelLoadError(f"{where}: num_kv_shared_layers {shared} leaves no layer of each kind with a cache")
        per_layer = whole("hidden_size_per_layer_input", 256, least=0) if fourth else 0
        return GemmaConfig(
            **{**vars(base), "norm_shift": shift},
            local_rope=small.rope,
            local_head_dim=small.head_dim,
            local_kv_heads=small.num_kv_heads,
            scale=1.0 if fourth else float(whole("query_pre_attn_scalar", 256)) ** -0.5,
            softcap=float(raw.get("final_logit_softcapping", 0.0)),
            keys_are_values=bool(raw.get("attention_k_eq_v")),
            num_shared=shared,
            wide=bool(raw.get("use_double_wide_mlp")),
            per_layer=per_layer,
            per_layer_vocab=whole("vocab_size_per_layer_input", 262144) if per_layer else 0,
        )

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        common, layers = super().gguf_config(file, raw) | {"hidden_activation": GELU[0]}, raw["num_hidden_layers"]
        if not raw["architectures"][0].startswith("Gemma4"):
            # No key says so: the largest model, of 62 layers, scales by another size.
            scalar = raw["hidden_size"] // raw["num_attention_heads"] if layers == 62 else raw["head_dim"]
            base = file.number("rope.global.freq_base", 1_000_000.0)  # Ollama's key
            base = file.number("rope.freq_base", base)
            if not common["sliding_window"]:
                common |= {"layer_types": [FULL] * layers, "sliding_window": 1}
            return {
                **common,
                "norms_stored_whole": True,
                "query_pre_attn_scalar": scalar,
                "rope_parameters": {**raw["rope_parameters"], "rope_theta": base},
            }
        pattern = "attention.sliding_window_pattern"
        keys = (pattern, "attention.head_count_kv", "feed_forward_length")  # the last two only where layers differ
        local, kv_heads, inner = (found if len(found := file.by_layer(key)) == layers else [] for key in keys)
        if 0 not in local:
            raise ModelLoadError(f"{file.path}: {pattern} must name {layers} layers, of which one sees all tokens")
        by_kind = dict(zip(map(bool, local), kv_heads))
        table, experts = file.tensors.get("per_layer_token_embd.weight"), file.number("expert_count", 0)
        return {
            **common,
            "layer_types": [SLIDING if x else FULL for x in local],
            "rope_parameters": {k: v for k, v in raw["rope_parameters"].items() if v != "default"},
            "head_dim": file.number("attention.key_length_swa"),
            "global_head_dim": raw["head_dim"],
            "num_key_value_heads": int(by_kind.get(True, raw["num_key_value_heads"])),
            "num_global_key_value_heads": int(by_kind.get(False, raw["num_key_value_heads"])),
            "attention_k_eq_v": f"blk.{local.index(0)}.attn_v.weight" not in file.tensors,
            "num_kv_shared_layers": int(file.number("attention.shared_kv_layers", 0)),
            "use_double_wide_mlp": bool(inner) and inner[-1] > inner[0],
            "hidden_size_per_layer_input": int(file.number("embedding_length_per_layer_input", 0)),
            "vocab_size_per_layer_input": table.shape[0] if table is not None else 0,
            "enable_moe_block": bool(experts),
            "num_experts": experts,
            "top_k_experts": file.number("expert_used_count", 0),
            "moe_intermediate_size": file.number("expert_feed_forward_length", 0),
        }

    # --- weights ---

    @classmethod
    def shapes(cls, config: GemmaConfig) -> dict[str, tuple[int, ...]]:
        shapes, width = super().shapes(config), config.num_layers * config.per_layer
        if width:
            shapes["model.embed_tokens_per_layer.weight"] = (config.per_layer_vocab, width)
            shapes["model.per_layer_model_projection.weight"] = (width, config.hidden_size)
            shapes["model.per_layer_projection_norm.weight"] = (config.per_layer,)
        return shapes

    @classmethod
    def layer_shapes(cls, config: GemmaConfig, layer: int) -> Shapes:
        at, c = f"model.layers.{layer}", config.layers[layer]
        shapes = layer_shapes(c, at, cls.norms, feed_forward=cls.mlp_shapes(c, at))
        if config.is_fourth:
            shapes[f"{at}.layer_scalar"] = (1,)
        if config.per_layer:
            shapes[f"{at}.per_layer_input_gate.weight"] = (config.per_layer, c.hidden_size)
            shapes[f"{at}.per_layer_projection.weight"] = (c.hidden_size, config.per_layer)
            shapes[f"{at}.post_per_layer_input_norm.weight"] = (c.hidden_size,)
        spare = set(cls.spare(config))
        return {n: s for n, s in shapes.items() if n not in spare}

    @classmethod
    def spare(cls, config: GemmaConfig) -> list[str]:
        """Keys and values of layers that read another layer's, and values where the keys are."""
        names = []
        for i, window in enumerate(config.windows):
            parts = ["v_proj"] if config.keys_are_values and window is None else []
            parts = ["k_proj", "k_norm", "v_proj"] if config.caches[i] != i else parts
            names += [f"model.layers.{i}.self_attn.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
        return names

    @classmethod
    def read(cls, reader: WeightReader, dense: str) -> GemmaWeights:
        weights = GemmaWeights(**vars(super().read(reader, dense)))
        if "model.embed_tokens_per_layer.weight" not in reader.shapes:
            return weights
        return replace(
            weights,
            layer_embedding=reader.matrix("model.embed_tokens_per_layer"),
            layer_projection=reader.matrix("model.per_layer_model_projection"),
            layer_norm=reader.norm("model.per_layer_projection_norm"),
        )

    @classmethod
    def read_layer(cls, reader: WeightReader, layer: int) -> GemmaLayer:
        at, c = f"model.layers.{layer}", reader.config
        usual = {**cls.read_mixer(reader, layer), **cls.read_mlp(reader, at)}
        own = {
            "attention_out": usual["post_norm"],
            "post_norm": reader.norm(f"{at}.pre_feedforward_layernorm"),
            "feedforward_out": reader.norm(f"{at}.post_feedforward_layernorm"),
        }
        if c.is_fourth:
            own["factor"] = float(reader.vector(f"{at}.layer_scalar"))
            own["v_norm"] = None if usual["k_norm"] is None else torch.ones_like(usual["k_norm"])
        if c.per_layer:
            own["input_gate"] = reader.matrix(f"{at}.per_layer_input_gate")
            own["input_up"] = reader.matrix(f"{at}.per_layer_projection")
            own["input_out"] = reader.norm(f"{at}.post_per_layer_input_norm")
        return GemmaLayer(**{**usual, **own})

    # --- a pass ---

    def __init__(self, config: GemmaConfig, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        self.local_rope = rope_table(config.local_rope, config.local_head_dim, self.max_model_len).to(self.device)

    def _states(self, ops: Ops, batch: Batch, cache: KVCache) -> Iterator[Tensor]:
        x = ops.embedding(batch.token_ids, self.weights.embedding, math.sqrt(self.config.hidden_size))  # [T, C]
        inputs = self._layer_inputs(ops, batch, x)
        for i in range(self.config.num_layers):
            x = self._layer(ops, i, x, inputs, batch, cache.layers)
            yield x

    def _logits(self, ops: Ops, rows: RowSource) -> Tensor:
        logits = super()._logits(ops, rows)
        return ops.softcap(logits, self.config.softcap) if self.config.softcap else logits

    def _layer(self, ops: Ops, i: int, x: Tensor, inputs: Seq[Tensor], batch: Batch, caches: Seq[KVLayer]) -> Tensor:
        """The output [T, C] of layer i; `inputs`: see `_layer_inputs`."""
        w, eps = self.weights.layers[i], self.config.rms_eps
        x = self._attend(ops, i, w, x, batch, caches)
        x = ops.norm_add(self._feed_forward(ops, w, x), w.feedforward_out, eps, x, 1.0 if inputs else w.factor)
        if not inputs:
            return x
        gate = ops.product(plain_rows(x), w.input_gate)  # [T, P]
        out = ops.product(gated_rows(ops.beside([gate, inputs[i]]), "gelu"), w.input_up)
        return ops.norm_add(out, w.input_out, eps, x, w.factor)

    def _feed_forward(self, ops: Ops, w: Any, x: Tensor) -> Tensor:
        """What the feed-forward network makes of x [T, C], before the norm of its output."""
        gate_up = ops.product(normed_rows(x, w.post_norm, self.config.rms_eps), w.gate_up)  # [T, 2 I]
        return ops.product(gated_rows(gate_up, "gelu"), w.down)

    def _attend(self, ops: Ops, i: int, w: GemmaLayer, x: Tensor, batch: Batch, caches: Seq[KVLayer]) -> Tensor:
        """x [T, C] plus what attention adds."""
        config = self.config
        assert w.q_norm is not None
        c, kv, window = config.layers[i], caches[config.caches[i]], config.windows[i]
        width = c.num_heads * c.head_dim
        qkv = ops.product(normed_rows(x, w.input_norm, c.rms_eps), w.qkv, w.qkv_bias)
        if config.keys_are_values and window is None and w.k_norm is not None:
            qkv = ops.beside([qkv, qkv[:, width:]])
        norms = tuple(n for n in (w.q_norm, w.k_norm, w.v_norm) if n is not None)
        rope = self.rope if window is None else self.local_rope
        q = ops.rope_store(qkv, c.num_heads, kv, batch, rope, norms, c.rms_eps, config.caches[i] == i)  # [T, H, D]
        out = ops.attention(q, kv, batch, config.scale, window).view(-1, width)
        return ops.norm_add(ops.product(plain_rows(out), w.o, w.o_bias), w.attention_out, c.rms_eps, x)

    def _layer_inputs(self, ops: Ops, batch: Batch, x: Tensor) -> list[Tensor]:
        """What each layer of an E model adds by token, [T, P] each."""
        c, w = self.config, self.weights
        assert isinstance(w, GemmaWeights)
        if w.layer_embedding is None or w.layer_projection is None or w.layer_norm is None:
            return []
        own = ops.embedding(batch.token_ids, w.layer_embedding, math.sqrt(c.per_layer))  # [T, L P]
        projected = ops.product(plain_rows(x), w.layer_projection)
        # The projection is meant to be divided by sqrt(C) before its norm: this is an epsilon C times as large.
        parts = [slice(i * c.per_layer, (i + 1) * c.per_layer) for i in range(c.num_layers)]
        eps = c.rms_eps * c.hidden_size
        return [ops.norm_add(projected[:, p], w.layer_norm, eps, own[:, p], 2**-0.5) for p in parts]


def _layer_types(raw: Mapping[str, Any], fourth: bool) -> list[str]:
    kinds, layers = raw.get("layer_types"), raw["num_hidden_layers"]
    every = raw.get("sliding_window_pattern") or PATTERN
    kinds = kinds if isinstance(kinds, list) else [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    return [*kinds[:-1], FULL] if fourth and len(kinds) == layers else kinds


def _ropes(raw: Mapping[str, Any], fourth: bool, head_dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rope settings of layers that see all tokens and of those with a window; older files name two bases."""
    by_kind = raw.get("rope_parameters") or {}
    full = {"rope_theta": raw.get("rope_theta", 1_000_000.0), **(raw.get("rope_scaling") or {})}
    full |= by_kind.get(FULL) or ({} if SLIDING in by_kind else by_kind)
    local = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0), **(by_kind.get(SLIDING) or {})}
    if fourth and full.get("rope_type") in (None, "proportional"):  # most of a head does not turn
        turned = int(full.get("partial_rotary_factor", 1.0 if "rope_type" in full else 0.25) * head_dim // 2)
        factors = [float(full.get("factor", 1.0))] * turned + [math.inf] * (head_dim // 2 - turned)
        full = {"rope_type": "factors", "rope_theta": full["rope_theta"], "factors": factors}
    return full, local
