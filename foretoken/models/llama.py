"""Llama: the family's one definition. Which member it is, flags of ModelConfig say."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.batch import Batch
from foretoken.kvcache.cache import KVCache
from foretoken.models.config import ModelConfig
from foretoken.models.layers import LayerWeights, ModelWeights, rope_table
from foretoken.ops import Ops


class Llama:
    """A decoder with its weights and the ops that run it; the batch and the cache arrive as arguments."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops, max_model_len: int | None = None) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.device = weights.norm.device
        self.max_model_len = max_model_len or config.max_model_len
        self.rope = rope_table(config.rope, config.head_dim, self.max_model_len).to(self.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, captures: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Run the rows of `batch`, storing their keys and values.

        Returns logits float32 [R, V] of `batch.logit_rows`, and, if `captures` names layers, what leaves those layers
        for every row, side by side: float32 [T, len(captures) * C].
        """
        ops, w = self.ops, self.weights
        x = ops.embedding(batch.token_ids, w.embedding)  # [T, C]
        kept: dict[int, Tensor] = {}
        for i, layer in enumerate(w.layers):
            x = x + self._attention(i, layer, ops.rms_norm(x, layer.input_norm, self.config.rms_eps), batch, cache)
            x = x + self._mlp(layer, ops.rms_norm(x, layer.post_norm, self.config.rms_eps))
            if i in captures:
                kept[i] = x
        rows = x.index_select(0, batch.logit_rows)  # [R, C]
        logits = ops.linear(ops.rms_norm(rows, w.norm, self.config.rms_eps), w.lm_head)
        return logits, torch.cat([kept[i] for i in captures], dim=1) if captures else None

    def _attention(self, i: int, w: LayerWeights, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        ops, c = self.ops, self.config
        num_q, num_kv, dim = c.num_heads, c.num_kv_heads, c.head_dim
        qkv = ops.linear(x, w.qkv, w.qkv_bias).view(-1, num_q + 2 * num_kv, dim)  # [T, H + 2 Hk, D]
        q, k, v = qkv[:, :num_q], qkv[:, num_q : num_q + num_kv], qkv[:, num_q + num_kv :]
        if w.q_norm is not None and w.k_norm is not None:
            q = ops.rms_norm(q.reshape(-1, dim), w.q_norm, c.rms_eps).view(-1, num_q, dim)
            k = ops.rms_norm(k.reshape(-1, dim), w.k_norm, c.rms_eps).view(-1, num_kv, dim)
        q, k = ops.rope(q, batch.positions, self.rope), ops.rope(k, batch.positions, self.rope)
        kv = cache.layer(i)
        ops.store_kv(k, v, kv, batch.slots)
        out = ops.attention(q, kv, batch, dim**-0.5, c.windows[i])  # [T, H, D]
        return ops.linear(out.reshape(-1, num_q * dim), w.o, w.o_bias)

    def _mlp(self, w: LayerWeights, x: Tensor) -> Tensor:
        return self.ops.linear(self.ops.silu_mul(self.ops.linear(x, w.gate_up, w.gate_up_bias)), w.down, w.down_bias)
