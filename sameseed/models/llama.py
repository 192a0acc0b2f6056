"""Llama: one definition for Llama, Mistral, Qwen2, Qwen3, SmolLM3 and Granite; flags of ModelConfig tell them apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.errors import ModelLoadError
from sameseed.kvcache.cache import KVCache
from sameseed.models.config import ModelConfig, base_config, positive_number, whole_number
from sameseed.models.decoder import Decoder, state_layers
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.layers import ModelWeights, before_mlp, feed_forward, run_layer
from sameseed.models.weights import WeightReader
from sameseed.ops import Ops, RowSource, StateLayer, Then, normed_rows

GRANITE = {  # its factors by GGUF's names
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


class Llama(Decoder):
    """The decoder of the Llama family."""

    gguf_factors: ClassVar = {"GraniteForCausalLM": GRANITE}

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        name = raw["architectures"][0]
        base = base_config(raw, where, qkv_bias=name == "Qwen2ForCausalLM", qk_norm=name == "Qwen3ForCausalLM")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("llama_4_scaling_beta"):  # queries further out would be scaled
            return replace(base, max_model_len=min(base.max_model_len, base.rope.original_max_len))
        if name == "SmolLM3ForCausalLM":
            every = whole_number(raw, where, "no_rope_layer_interval", 4)
            turns = raw.get("no_rope_layers") or [(i + 1) % every for i in range(base.num_layers)]
            if not isinstance(turns, list) or len(turns) < base.num_layers:
                raise ModelLoadError(f"{where}: no_rope_layers must list all {base.num_layers} layers")
            still = frozenset(i for i, turn in enumerate(turns[: base.num_layers]) if not turn)
            slides = still if raw.get("use_sliding_window") else ()
            windows = tuple(w if i in slides else None for i, w in enumerate(base.windows))
            return replace(base, still_layers=still, windows=base.windows if raw.get("layer_types") else windows)
        if name == "GraniteForCausalLM":
            embedding, scores, residual, logits = (positive_number(raw, n, 1.0, where) for n in GRANITE.values())
            # Rows are kept divided by the factor of residuals, which norms do not notice where eps is adapted to it.
            base = replace(base, rms_eps=base.rms_eps / residual**2, embedding_factor=embedding / residual)
            return replace(base, score_factor=scores, logit_divisor=logits)
        return base

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        more = super().gguf_config(file, raw)
        if raw["architectures"][0] == "GraniteForCausalLM":
            more |= {name: file.number(key) for key, name in GRANITE.items()}
        if raw["architectures"][0] == "Ministral3ForCausalLM":
            scales = {"mscale": 1.0, "mscale_all_dim": file.number("rope.scaling.yarn_log_multiplier", 0.0)}
            scales["llama_4_scaling_beta"] = file.number("attention.temperature_scale", 0.0)
            more["rope_parameters"] = raw["rope_parameters"] | scales
        return more

    @classmethod
    def read(cls, reader: WeightReader, dense: str) -> ModelWeights:
        weights = super().read(reader, dense)
        return replace(weights, norm=weights.norm / reader.config.logit_divisor)

    def __init__(self, config: ModelConfig, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        self.still = self.rope
        if config.still_layers:
            self.still = torch.ones_like(self.rope)
            self.still[:, config.head_dim // 2 :] = 0  # sines

    def _mixed(self, ops: Ops, w: Any, rows: RowSource, state: StateLayer, batch: Batch) -> RowSource:
        """What a recurrent layer makes of its rows and its state, in place of attention."""
        raise NotImplementedError

    def _states(self, ops: Ops, batch: Batch, cache: KVCache) -> Iterator[Tensor]:
        c, layers, eps = self.config, self.weights.layers, self.config.rms_eps
        caches, states = iter(cache.layers), iter(state_layers(cache) if c.recurrent else ())
        x = ops.embedding(batch.token_ids, self.weights.embedding, c.embedding_factor)  # [T, C]
        for i, w in enumerate(layers):
            rows = normed_rows(x, w.input_norm, eps)
            then = Then(layers[i + 1].input_norm, eps, layers[i + 1].qkv) if i + 1 < len(layers) else None
            if i in c.recurrent:
                x = ops.product(self._mixed(ops, w, rows, next(states), batch), w.o, None, x, before_mlp(c, w))
                x = feed_forward(ops, c, w, x, then)
            else:
                rope = self.still if i in c.still_layers else self.rope
                x = run_layer(ops, c, w, rows, x, batch, next(caches), rope, c.windows[i], then)
            yield x
