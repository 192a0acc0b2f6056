"""Runnable: what decoders and draft heads share. Decoder: what all families of models share.

A family is a subclass of Decoder in a file of this folder, named in `config.ARCHITECTURES`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence as Seq
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from sameseed.batch import Batch, Steps
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.kvcache.cache import KVCache
from sameseed.models.config import ModelConfig, View, base_config, layer_shapes, mlp_shapes, one_of
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.layers import LayerWeights, ModelWeights, rope_table
from sameseed.models.weights import Shapes, WeightReader
from sameseed.ops import Grown, Ops, Results, RowSource, StateLayer, normed_rows


class Runnable:
    """A model with the ops that run it; the backend runs its passes op by op, or records and replays them.

    `how` is the part of a pass that may differ: captured layers, or a head's window. `token_ids` int64 [n]: the tokens
    of the LM head's rows, if it does not have a row for every token. `grow(trees, num_rows, logits, features, cache,
    how, ends)` grows draft trees with one pass per level (`PlanReplay.grow`); None where the backend cannot.
    """

    def __init__(self, ops: Ops, device: torch.device, token_ids: Tensor | None = None) -> None:
        self.ops = ops
        self.device = device
        self.token_ids = token_ids
        # A weak reference: a cycle would keep gigabytes of weights alive until the next garbage collection.
        forward = weakref.WeakMethod(self._forward)
        self._run = ops.replayer(lambda *args: cast(Any, forward())(*args))
        self.grow: Callable[..., Grown | None] = getattr(self._run, "grow", lambda *_: None)

    @torch.inference_mode()
    def chain(self, batch: Batch, steps: Steps, cache: KVCache, how: tuple[int, ...], *inputs: Tensor) -> Tensor | None:
        """Run all `steps` of a chain in one call and return its tokens (`Ops.replayer`); None if unsupported."""
        chain = getattr(self._run, "chain", None)
        return None if chain is None else cast("Tensor | None", chain(batch, steps, cache, how, *inputs))

    def _pass(self, batch: Batch, cache: KVCache, how: tuple[int, ...], *inputs: Tensor) -> Results:
        """One pass, and the tokens drawn by `batch.draws`; None where the backend cannot draw."""
        logits, hidden, chosen = self._run(batch, cache, how, *inputs)
        if chosen is None and batch.draws is not None:  # the pass itself did not choose
            chosen = self.ops.choose(logits, batch.draws.on(self.device), self.token_ids)
        return logits, hidden, chosen

    def _chosen(self, ops: Ops, logits: Tensor, batch: Batch) -> Tensor | None:
        return None if batch.draws is None else ops.choose(logits, batch.draws, self.token_ids)

    def _forward(self, *args: Any, **kwargs: Any) -> Results:
        """One pass over (ops, batch, cache, how, ...): logits [R, V], captured states, and tokens that were drawn.

        Everything that reads rows goes through `ops`: a backend may record the calls and replay them.
        """
        raise NotImplementedError


# Keys of GGUF files that would change what is computed, with the values that change nothing.
FACTORS: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
}


class Decoder(Runnable):
    """A decoder with its weights and the ops that run it; the batch and the KV cache are arguments of each pass.

    A family defines `_states`, and overrides what differs from Llama: how its config and its weights are read.
    """

    modules: ClassVar[Mapping[str, str]] = {}  # of a layer, by Llama's names, where checkpoints have others
    norms: ClassVar[Seq[str]] = ("input_layernorm", "post_attention_layernorm")  # of a layer, in Hugging Face's names
    last_norm: ClassVar[str] = "model.norm"  # before the LM head
    rotates_all: ClassVar[bool] = True  # whether all dimensions of a head rotate
    by_layer: ClassVar[bool] = False  # whether GGUF keys may list sizes that differ from layer to layer
    # GGUF's names of a layer's modules, and of those outside layers, by Hugging Face's. An entry may also be the name
    # of a tensor within a layer: "layer_scalar": "layer_output_scale.weight".
    gguf_names: ClassVar[Mapping[str, str]] = {
        **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"self_attn.{n}_norm": f"attn_{n}_norm" for n in "qk"},
        **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    # Numbers of GGUF files by their names in config.json: the key there, and the default if it may be missing.
    gguf_keys: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    gguf_factors: ClassVar[Mapping[str, Collection[str]]] = {}  # those of FACTORS that are read otherwise, by model

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """The config from a config.json, or from what stands for it (`gguf_config`). Raises ModelLoadError."""
        return base_config(raw, where)

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        """What the family adds to the config.json `raw` of a GGUF file, or replaces there. Raises ModelLoadError.

        It may add keys of its own that say how GGUF stores tensors differently, for `parse`.
        """
        if "mlp.experts.down_proj" not in cls.gguf_names and file.number("expert_count", 0):
            raise ModelLoadError(f"{file.path}: mixtures of experts are not supported in this architecture")
        own = {*cls.gguf_factors.get(raw["architectures"][0], ()), *(key for key, *_ in cls.gguf_keys.values())}
        for key, same in FACTORS.items():
            usual = [float(np.float32(raw["head_dim"] ** -0.5))] if key == "attention.scale" else []
            if key not in own:
                one_of(file.number(key, 0), [*same, *usual], f"{file.path}: {key}", "take the model's own folder")
        return {name: file.number(*key) for name, key in cls.gguf_keys.items()}

    @classmethod
    def shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint by Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
        for i in range(config.num_layers):
            shapes |= cls.layer_shapes(config, i)
        shapes[f"{cls.last_norm}.weight"] = (config.hidden_size,)
        if not config.tied_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
        return shapes

    @classmethod
    def layer_shapes(cls, config: Any, layer: int) -> Shapes:
        at = f"model.layers.{layer}"
        return layer_shapes(config, at, cls.norms, feed_forward=cls.mlp_shapes(config, at))

    @classmethod
    def mlp_shapes(cls, config: Any, at: str) -> Shapes:
        """Of the feed-forward network of the layer whose tensors' names begin with `at`."""
        return mlp_shapes(config, f"{at}.mlp")

    @classmethod
    def spare(cls, config: Any) -> Seq[str]:
        """Tensors that a checkpoint may hold and that are not read."""
        return ()

    @classmethod
    def views(cls, config: Any) -> dict[str, View]:
        """Where a checkpoint may hold tensors of `shapes` that are stacked in others, by name."""
        return {}

    @classmethod
    def read(cls, reader: WeightReader, dense: str) -> ModelWeights:
        """All weights of a model."""
        c = reader.config
        embedding = reader.matrix("model.embed_tokens", reader.spread)
        layers = tuple(reader.spread(lambda i: cls.read_layer(reader, i), range(c.num_layers)))
        norm = reader.norm(cls.last_norm)
        head = embedding if c.tied_embeddings else reader.matrix("lm_head", reader.spread)
        return ModelWeights(embedding, layers, norm, head, dense)

    @classmethod
    def read_layer(cls, reader: WeightReader, layer: int) -> LayerWeights:
        """Weights of one layer; layers are read side by side."""
        return LayerWeights(**cls.read_mixer(reader, layer), **cls.read_mlp(reader, f"model.layers.{layer}"))

    @classmethod
    def read_mixer(cls, reader: WeightReader, layer: int) -> dict[str, Any]:
        """The fields of a layer's attention, or of what stands in its place."""
        return reader.attention(f"model.layers.{layer}")

    @classmethod
    def read_mlp(cls, reader: WeightReader, at: str) -> dict[str, Any]:
        """The fields of a layer's feed-forward network."""
        return reader.mlp(at)

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        max_model_len: int | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        """`token_ids` int64 [n]: the tokens of the LM head's rows, if it does not have a row for every token."""
        super().__init__(ops, weights.norm.device, token_ids)
        self.config = config
        self.weights = weights
        self.max_model_len = max_model_len or config.max_model_len
        self.rope = rope_table(config.rope, config.head_dim, self.max_model_len).to(self.device)

    @torch.inference_mode()
    def run(self, batch: Batch, cache: KVCache, captures: tuple[int, ...] = ()) -> Results:
        """Run the rows of `batch`, and store their keys and values in the cache.

        Returns logits float32 [R, V] of `batch.logit_rows`; if `captures` names layers, the outputs of these layers for
        every row, side by side: float32 [T, len(captures) * C]; and the tokens int32 [R] drawn by `batch.draws`, None
        where the backend cannot draw.
        """
        logits, hidden, chosen = self._pass(batch, cache, captures)
        if self.token_ids is not None:
            whole = logits.new_full((logits.shape[0], self.config.vocab_size), -torch.inf)
            logits = whole.index_copy_(1, self.token_ids, logits)
        return logits, hidden, chosen

    def _states(self, ops: Ops, batch: Batch, cache: KVCache) -> Iterator[Tensor]:
        """A pass without its end: the output [T, C] of each layer."""
        raise NotImplementedError

    def _logits(self, ops: Ops, rows: RowSource) -> Tensor:
        return ops.product(rows, self.weights.lm_head)

    def _forward(self, ops: Ops, batch: Batch, cache: KVCache, captures: tuple[int, ...]) -> Results:
        batch, x, kept = batch.on(self.device), torch.empty(0), dict[int, Tensor]()
        for i, x in enumerate(self._states(ops, batch, cache)):
            if i in captures:
                kept[i] = x
        logits = self._logits(ops, normed_rows(x, self.weights.norm, self.config.rms_eps, batch.logit_rows))
        hidden = ops.capture([kept[i] for i in captures]) if captures else None
        return logits, hidden, self._chosen(ops, logits, batch)


def state_layers(cache: KVCache) -> list[StateLayer]:
    """What the recurrent layers of a model keep. Raises ConfigError for a cache without it."""
    if cache.states is None:
        raise ConfigError("recurrent layers cannot be checked or timed apart from an engine; take another model")
    return cache.states.layers
