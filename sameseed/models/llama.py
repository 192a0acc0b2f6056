"""Llama: one definition for Llama, Mistral, Qwen2 and Qwen3; flags of ModelConfig select the member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sameseed.batch import Batch
from sameseed.kvcache.cache import KVCache
from sameseed.models.config import ModelConfig, base_config
from sameseed.models.decoder import Decoder
from sameseed.models.layers import run_layer
from sameseed.ops import Ops, RowSource, Then, normed_rows


class Llama(Decoder):
    """The decoder of the Llama family."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        name = raw["architectures"][0]
        return base_config(raw, where, qkv_bias=name == "Qwen2ForCausalLM", qk_norm=name == "Qwen3ForCausalLM")

    def _layer(
        self, ops: Ops, i: int, rows: RowSource, x: Tensor, batch: Batch, cache: KVCache, then: Then | None
    ) -> Tensor:
        window = self.config.windows[i]
        return run_layer(
            ops, self.config, self.weights.layers[i], rows, x, batch, cache.layers[i], self.rope, window, then
        )

    def _forward(
        self, ops: Ops, batch: Batch, cache: KVCache, captures: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        w, eps = self.weights, self.config.rms_eps
        batch = batch.on(self.device)
        x = ops.embedding(batch.token_ids, w.embedding)  # [T, C]
        kept: dict[int, Tensor] = {}
        for i, layer in enumerate(w.layers):
            rows = normed_rows(x, layer.input_norm, eps)
            then = Then(w.layers[i + 1].input_norm, eps, w.layers[i + 1].qkv) if i + 1 < len(w.layers) else None
            x = self._layer(ops, i, rows, x, batch, cache, then)
            if i in captures:
                kept[i] = x
        logits = ops.product(normed_rows(x, w.norm, eps, batch.logit_rows), w.lm_head)
        hidden = ops.capture([kept[i] for i in captures]) if captures else None
        chosen = None if batch.draws is None else ops.choose(logits, batch.draws, self.token_ids)
        return logits, hidden, chosen


MODEL = Llama
