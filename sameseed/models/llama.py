"""Llama: the family's one definition. Which member it is, flags of ModelConfig say."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.kvcache.cache import KVCache
from sameseed.models.config import ModelConfig
from sameseed.models.layers import LayerWeights, ModelWeights, rope_table
from sameseed.ops import Ops, gated_rows, normed_rows, plain_rows


class Llama:
    """A decoder with its weights and the ops that run it; the batch and the cache arrive as arguments."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        max_model_len: int | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        """`token_ids` int64 [n]: the tokens of the LM head's rows, where it has not one for each."""
        self.config = config
        self.weights = weights
        self.ops = ops
        self.device = weights.norm.device
        self.token_ids = token_ids
        self.max_model_len = max_model_len or config.max_model_len
        self.rope = rope_table(config.rope, config.head_dim, self.max_model_len).to(self.device)
        # Weakly: a cycle would keep gigabytes of weights alive until the garbage collector comes by.
        forward = weakref.WeakMethod(self._forward)
        self._run = ops.replayer(lambda *args: cast(Any, forward())(*args))

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, captures: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Run the rows of `batch`, storing their keys and values.

        Returns logits float32 [R, V] of `batch.logit_rows`, and, if `captures` names layers, what leaves those layers
        for every row, side by side: float32 [T, len(captures) * C].
        """
        logits, hidden = self._run(batch, cache, captures)
        if self.token_ids is not None:
            whole = logits.new_full((logits.shape[0], self.config.vocab_size), -torch.inf)
            logits = whole.index_copy_(1, self.token_ids, logits)
        return logits, hidden

    def _forward(
        self, ops: Ops, batch: Batch, cache: KVCache, captures: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        w, eps = self.weights, self.config.rms_eps
        x = ops.embedding(batch.token_ids, w.embedding)  # [T, C]
        kept: dict[int, Tensor] = {}
        for i, layer in enumerate(w.layers):
            x = self._attention(ops, i, layer, x, batch, cache)
            gate_up = ops.product(normed_rows(x, layer.post_norm, eps), layer.gate_up, layer.gate_up_bias)  # [T, 2 I]
            x = ops.product(gated_rows(gate_up), layer.down, layer.down_bias, residual=x)
            if i in captures:
                kept[i] = x
        logits = ops.product(normed_rows(x, w.norm, eps, batch.logit_rows), w.lm_head)
        return logits, ops.capture([kept[i] for i in captures]) if captures else None

    def _attention(self, ops: Ops, i: int, w: LayerWeights, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """x [T, C] plus what attention adds to it."""
        c = self.config
        kv = cache.layer(i)
        qkv = ops.product(normed_rows(x, w.input_norm, c.rms_eps), w.qkv, w.qkv_bias)  # [T, (H + 2 Hk) D]
        norms = None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
        q = ops.rope_store(qkv, c.num_heads, kv, batch, self.rope, norms, c.rms_eps)  # [T, H, D]
        out = ops.attention(q, kv, batch, c.head_dim**-0.5, c.windows[i])  # [T, H, D]
        return ops.product(plain_rows(out.view(-1, c.num_heads * c.head_dim)), w.o, w.o_bias, residual=x)
