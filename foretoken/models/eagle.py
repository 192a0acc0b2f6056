"""EAGLE heads: one decoder layer that guesses on from the target's own hidden states.

EAGLE-1 and 2 (Li et al., 2024): fc of [embedding; feature], then a layer without its first norm, then the target's
head; a feature is what enters the target's head. EAGLE-3 (Li et al., 2025): fc of three of the target's layers makes
the feature, and q, k, v read [norm(embedding); norm(feature)]. The feature at position t goes with token t + 1.

Letters as in `ops`; F: width of the hidden states that the head takes from the target, Vd: its own vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.batch import Batch
from foretoken.formats.scheme import QuantTensor
from foretoken.kvcache.cache import KVCache
from foretoken.models.eagle_config import HeadConfig, expected_tensors
from foretoken.models.layers import LayerWeights, rope_table
from foretoken.ops import Ops

__all__ = ["EagleHead", "HeadWeights", "expected_tensors"]


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a head. Norms are float32; those of the other kind of head are None.

    `target_ids` int32 [Vd]: the target's token of each of the head's own, None where they are the same.
    """

    embedding: QuantTensor  # [V, C]
    fc: QuantTensor  # EAGLE-3: [C, F], else [C, 2 C]
    fc_bias: Tensor | None
    fc_norms: tuple[Tensor, ...]  # EAGLE-3: one [F], one [F / n] for each captured layer, or none
    layer: LayerWeights  # EAGLE-3: its qkv is [(H + 2 Hk) D, 2 C], its input_norm the embedding's
    feature_norm: Tensor | None  # [C], EAGLE-3's hidden_norm
    norm: Tensor | None  # [C], EAGLE-3
    target_norm: Tensor | None  # [C], EAGLE-1: what the target does before its head
    lm_head: QuantTensor  # [Vd, C]
    target_ids: Tensor | None
    dense: str = "fp32"


class EagleHead:
    """A head with its weights and the ops that run it; the batch, the features and the cache arrive as arguments."""

    def __init__(
        self, config: HeadConfig, weights: HeadWeights, ops: Ops, target_eps: float, max_model_len: int
    ) -> None:
        """`target_eps`: of the target's norm; `max_model_len`: positions that the rotary table holds."""
        self.config = config
        self.weights = weights
        self.ops = ops
        self.target_eps = target_eps
        self.device = weights.layer.post_norm.device
        self.max_model_len = max_model_len
        self.rope = rope_table(config.layer.rope, config.layer.head_dim, max_model_len).to(self.device)

    @torch.inference_mode()
    def features(self, hidden: Tensor) -> Tensor:
        """Features [T, C] of the target's captured hidden states [T, F]."""
        w, eps = self.weights, self.config.layer.rms_eps
        if w.target_norm is not None:
            return self.ops.rms_norm(hidden, w.target_norm, self.target_eps)
        if len(w.fc_norms) == 1 and self.config.norm_before_fc:
            hidden = self.ops.rms_norm(hidden, w.fc_norms[0], eps)
        elif w.fc_norms:
            parts = hidden.chunk(len(w.fc_norms), dim=1)
            normed = [self.ops.rms_norm(x.contiguous(), n, eps) for x, n in zip(parts, w.fc_norms, strict=True)]
            hidden = torch.cat(normed, dim=1)
        return self.ops.linear(hidden, w.fc)

    @torch.inference_mode()
    def forward(
        self, features: Tensor, batch: Batch, cache: KVCache, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the rows of `batch`, each a token with the feature [T, C] of the position before it.

        Returns logits float32 [R, Vd] of `batch.logit_rows`, and the head's own features [T, C], which stand for the
        target's where it goes on by itself. `window`: tokens that a row sees, itself among them.
        """
        w, c, ops = self.weights, self.config.layer, self.ops
        third = w.feature_norm is not None
        embedding = ops.embedding(batch.token_ids, w.embedding)  # [T, C]
        if w.feature_norm is not None:
            normed = ops.rms_norm(features, w.feature_norm, c.rms_eps)
            residual = normed if self.config.norm_before_residual else features
            entering = torch.cat([ops.rms_norm(embedding, w.layer.input_norm, c.rms_eps), normed], dim=1)  # [T, 2 C]
        else:
            entering = residual = ops.linear(torch.cat([embedding, features], dim=1), w.fc, w.fc_bias)  # [T, C]
        qkv = ops.linear(entering, w.layer.qkv, w.layer.qkv_bias)
        x = self._attention(qkv, residual.contiguous(), batch, cache, window)
        gate_up = ops.norm_linear(x, w.layer.post_norm, c.rms_eps, w.layer.gate_up, w.layer.gate_up_bias)  # [T, 2 I]
        x = ops.silu_linear(gate_up, w.layer.down, w.layer.down_bias, residual=x)
        if w.norm is None:
            return ops.linear(x.index_select(0, batch.logit_rows), w.lm_head), x
        logits = ops.norm_linear(x, w.norm, c.rms_eps, w.lm_head, rows=batch.logit_rows)
        return logits, ops.rms_norm(x, w.norm, c.rms_eps) if third and self.config.norm_output else x

    def _attention(self, qkv: Tensor, residual: Tensor, batch: Batch, cache: KVCache, window: int | None) -> Tensor:
        """`residual` [T, C] plus what attention adds to it."""
        c, w = self.config.layer, self.weights.layer
        kv = cache.layer(0)
        norms = None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
        q = self.ops.rope_store(qkv, c.num_heads, kv, batch, self.rope, norms, c.rms_eps)  # [T, H, D]
        windows = [n for n in (window, c.windows[0]) if n is not None]
        out = self.ops.attention(q, kv, batch, c.head_dim**-0.5, min(windows, default=None))  # [T, H, D]
        return self.ops.linear(out.view(-1, c.num_heads * c.head_dim), w.o, w.o_bias, residual=residual)
