"""Block heads: all tokens of a draft in one pass (DFlash: Chen et al., 2026; DSpark: DeepSeek-AI, 2026).

A block is the last known token followed by mask tokens. A few decoder layers read it; every place attends to the whole
block. Each layer also attends to keys and values computed from the target's hidden states: fc of several of the
target's layers, normed, then the layer's own projections. A Markov head may add to the logits of the next token a bias
that depends on the token before.

Letters as in `ops`; F: width of the hidden states that the head reads from the target, Vd: size of the head's own
vocabulary, A: rank of the Markov head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.kvcache.cache import KVCache
from sameseed.models.head_config import BlockConfig
from sameseed.models.layers import LayerWeights, rope_table, run_layer
from sameseed.models.runnable import Runnable
from sameseed.ops import Ops, normed_rows, plain_rows
from sameseed.scheme import QuantTensor

INJECT, GUESS = (1,), (0,)  # the two passes


@dataclass(frozen=True)
class BlockWeights:
    """Weights of a block head. Norms are float32; `target_ids` int32 [Vd] as in `HeadWeights`.

    `markov`: embedding [V, A] and projection [Vd, A] of the Markov head, or None.
    """

    embedding: QuantTensor  # [V, C]
    fc: QuantTensor  # [C, F]
    hidden_norm: Tensor  # [C]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [C]
    lm_head: QuantTensor  # [Vd, C]
    markov: tuple[QuantTensor, QuantTensor] | None
    target_ids: Tensor | None
    dense: str = "fp32"


class BlockHead(Runnable):
    """A block head with its weights and the ops that run it; batch, hidden states and cache are arguments of a pass."""

    def __init__(self, config: BlockConfig, weights: BlockWeights, ops: Ops, max_model_len: int) -> None:
        """`max_model_len`: of the target; that of the head may be shorter."""
        super().__init__(ops, weights.norm.device)
        self.config = config
        self.weights = weights
        self.max_model_len = min(max_model_len, config.layer.max_model_len)
        # A block may begin at the last position of the context, so the table is longer by one block.
        rope = rope_table(config.layer.rope, config.layer.head_dim, self.max_model_len + config.block_size)
        self.rope = rope.to(self.device)

    @torch.inference_mode()
    def inject(self, states: Tensor, batch: Batch, cache: KVCache) -> None:
        """Store keys and values, computed from the target's captured hidden states [T, F], for the rows of `batch`."""
        self._run(batch, cache, INJECT, states)

    @torch.inference_mode()
    def guess(self, batch: Batch, cache: KVCache) -> Tensor:
        """Logits float32 [R, Vd] of `batch.logit_rows` in blocks behind the stored rows, without the Markov head."""
        logits: Tensor = self._run(batch, cache, GUESS)[0]
        return logits

    @torch.inference_mode()
    def bias(self, token_ids: Tensor) -> Tensor:
        """The bias [B, Vd] that the Markov head adds to the logits after tokens [B] (ids of the target)."""
        assert self.weights.markov is not None
        before, after = self.weights.markov
        return self.ops.product(plain_rows(self.ops.embedding(token_ids, before)), after)

    def _forward(
        self, ops: Ops, batch: Batch, cache: KVCache, how: tuple[int, ...], *states: Tensor
    ) -> tuple[Tensor, None, None]:
        c, w, eps = self.config.layer, self.weights, self.config.layer.rms_eps
        batch = batch.on(self.device)
        if how == INJECT:  # store keys and values of the features [T, C] in the cache of every layer
            rows = normed_rows(ops.product(plain_rows(states[0]), w.fc), w.hidden_norm, eps)
            for layer, kv in zip(w.layers, cache.layers, strict=True):
                norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
                qkv = ops.product(rows, layer.qkv, layer.qkv_bias)  # [T, (H + 2 Hk) D]
                ops.rope_store(qkv, c.num_heads, kv, batch, self.rope, norms, eps)  # the queries are not used
            return torch.empty(0, 1), None, None
        x = ops.embedding(batch.token_ids, w.embedding)  # [T, C]
        for layer, kv in zip(w.layers, cache.layers, strict=True):
            rows = normed_rows(x, layer.input_norm, eps)
            x = run_layer(ops, c, layer, rows, x, batch, kv, self.rope, None)
        return ops.product(normed_rows(x, w.norm, eps, batch.logit_rows), w.lm_head), None, None
