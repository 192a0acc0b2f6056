"""EAGLE heads: one decoder layer that drafts from the target's own hidden states.

EAGLE-1 and 2 (Li et al., 2024): fc of [embedding; feature], then a layer without its first norm, then the target's LM
head; a feature is the input of the target's LM head. EAGLE-3 (Li et al., 2025): fc of three of the target's layers
makes the feature, and q, k, v read [norm(embedding); norm(feature)]. The feature at position t goes with token t + 1.

Letters as in `ops`; F: width of the hidden states that the head reads from the target, Vd: size of the head's own
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.kvcache.cache import KVCache
from sameseed.models.head_config import HeadConfig
from sameseed.models.layers import LayerWeights, rope_table, run_layer
from sameseed.models.runnable import Runnable
from sameseed.ops import Ops, normed_rows, plain_rows
from sameseed.scheme import QuantTensor


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a head. Norms are float32; norms that only the other kind of head has are None.

    `target_ids` int32 [Vd]: the target's token id of each token of the head; None if the ids are the same.
    """

    embedding: QuantTensor  # [V, C]
    fc: QuantTensor  # EAGLE-3: [C, F], else [C, 2 C]
    fc_bias: Tensor | None
    fc_norms: tuple[Tensor, ...]  # EAGLE-3: one [F] (`norm_before_fc`), then one [F / n] a captured layer (`fc_norm`)
    layer: LayerWeights  # EAGLE-3: its qkv is [(H + 2 Hk) D, 2 C], its input_norm the embedding's
    feature_norm: Tensor | None  # [C], EAGLE-3's hidden_norm
    norm: Tensor | None  # [C], EAGLE-3
    target_norm: Tensor | None  # [C], EAGLE-1: the target's norm before its LM head
    lm_head: QuantTensor  # [Vd, C]
    target_ids: Tensor | None
    dense: str = "fp32"


class EagleHead(Runnable):
    """A head with its weights and the ops that run it; batch, features and KV cache are arguments of each pass."""

    def __init__(
        self, config: HeadConfig, weights: HeadWeights, ops: Ops, target_eps: float, max_model_len: int
    ) -> None:
        """`target_eps`: eps of the target's norm; `max_model_len`: number of positions in the rotary table."""
        device, ids = weights.layer.post_norm.device, weights.target_ids
        super().__init__(ops, device, None if ids is None else ids.to(device, torch.int64))
        self.config = config
        self.weights = weights
        self.target_eps = target_eps
        self.max_model_len = max_model_len
        self.rope = rope_table(config.layer.rope, config.layer.head_dim, max_model_len).to(self.device)

    @torch.inference_mode()
    def forward(
        self, x: Tensor, batch: Batch, cache: KVCache, window: int | None = None, *, captured: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Run the rows of `batch`, each a token with the feature x [T, C] of the position before it.

        `captured`: x [T, F] are the target's captured hidden states, from which the features are computed. `window`:
        number of tokens that a row attends to, itself included. Returns logits float32 [R, Vd] of `batch.logit_rows`,
        and the head's own features [T, C], which replace the target's features when the head continues its own draft.
        """
        logits, features, _ = self.run(x, batch, cache, window, captured=captured)
        return logits, features

    @torch.inference_mode()
    def run(
        self, x: Tensor, batch: Batch, cache: KVCache, window: int | None = None, *, captured: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`forward`, and the tokens (ids of the target) drawn by `batch.draws`."""
        logits, features, chosen = self._pass(batch, cache, (int(captured), window or 0), x)
        assert features is not None
        return logits, features, chosen

    def _forward(
        self, ops: Ops, batch: Batch, cache: KVCache, how: tuple[int, int], x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`forward`; `how`: captured or not, and the window (0: none)."""
        c, w, eps = self.config.layer, self.weights, self.config.layer.rms_eps
        captured, window = how
        batch = batch.on(self.device)
        seen = min((n for n in (window, c.windows[0]) if n), default=None)

        def layer(entering: Tensor, residual: Tensor) -> Tensor:
            rows = plain_rows(entering)
            return run_layer(ops, c, w.layer, rows, residual, batch, cache.layers[0], self.rope, seen)

        features = self._features(ops, x) if captured else x
        embedding = ops.embedding(batch.token_ids, w.embedding)  # [T, C]
        if w.norm is None or w.feature_norm is None:
            residual = ops.product(plain_rows(ops.beside([embedding, features])), w.fc, w.fc_bias)  # [T, C]
            x = layer(residual, residual)
            logits = ops.product(plain_rows(x, batch.logit_rows), w.lm_head)
            return logits, ops.capture([x]), self._chosen(ops, logits, batch)
        normed = ops.rms_norm(features, w.feature_norm, eps)
        entering = ops.beside([ops.rms_norm(embedding, w.layer.input_norm, eps), normed])  # [T, 2 C]
        x = layer(entering, normed if self.config.norm_before_residual else features)
        logits = ops.product(normed_rows(x, w.norm, eps, batch.logit_rows), w.lm_head)
        own = ops.capture([ops.rms_norm(x, w.norm, eps) if self.config.norm_output else x])
        return logits, own, self._chosen(ops, logits, batch)

    def _chosen(self, ops: Ops, logits: Tensor, batch: Batch) -> Tensor | None:
        return None if batch.draws is None else ops.choose(logits, batch.draws, self.token_ids)

    def _features(self, ops: Ops, hidden: Tensor) -> Tensor:
        """Features [T, C] of the target's captured hidden states [T, F]."""
        w, eps = self.weights, self.config.layer.rms_eps
        if w.target_norm is not None:
            return ops.rms_norm(hidden, w.target_norm, self.target_eps)
        norms = list(w.fc_norms)
        if self.config.norm_before_fc:
            hidden = ops.rms_norm(hidden, norms.pop(0), eps)
        if norms:
            parts = hidden.chunk(len(norms), dim=1)
            hidden = ops.beside([ops.rms_norm(x, n, eps) for x, n in zip(parts, norms, strict=True)])
        return ops.product(plain_rows(hidden), w.fc)
