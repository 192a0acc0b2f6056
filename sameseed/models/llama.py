"""Llama: one definition for the whole model family; flags of ModelConfig select the member."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
from torch import Tensor

from sameseed.batch import Batch, Steps
from sameseed.kvcache.cache import KVCache
from sameseed.models.config import ModelConfig
from sameseed.models.layers import ModelWeights, rope_table, run_layer
from sameseed.ops import Ends, Grown, Ops, Then, normed_rows


class Llama:
    """A decoder with its weights and the ops that run it; the batch and the KV cache are arguments of each pass."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        max_model_len: int | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        """`token_ids` int64 [n]: the tokens of the LM head's rows, if it does not have a row for every token."""
        self.config = config
        self.weights = weights
        self.ops = ops
        self.device = weights.norm.device
        self.token_ids = token_ids
        self.max_model_len = max_model_len or config.max_model_len
        self.rope = rope_table(config.rope, config.head_dim, self.max_model_len).to(self.device)
        # A weak reference: a cycle would keep gigabytes of weights alive until the next garbage collection.
        forward = weakref.WeakMethod(self._forward)
        self._run = ops.replayer(lambda *args: cast(Any, forward())(*args))

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, captures: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Run the rows of `batch`, and store their keys and values in the cache.

        Returns logits float32 [R, V] of `batch.logit_rows`, and, if `captures` names layers, the outputs of these
        layers for every row, side by side: float32 [T, len(captures) * C].
        """
        logits, hidden, _ = self.run(batch, cache, captures)
        return logits, hidden

    @torch.inference_mode()
    def run(
        self, batch: Batch, cache: KVCache, captures: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`forward`, and the tokens int32 [R] drawn by `batch.draws`; None where the backend cannot draw."""
        logits, hidden, chosen = self._run(batch, cache, captures)
        if chosen is None and batch.draws is not None:  # the pass itself did not choose
            chosen = self.ops.choose(logits, batch.draws.on(self.device), self.token_ids)
        if self.token_ids is not None:
            whole = logits.new_full((logits.shape[0], self.config.vocab_size), -torch.inf)
            logits = whole.index_copy_(1, self.token_ids, logits)
        return logits, hidden, chosen

    @torch.inference_mode()
    def chain(self, batch: Batch, steps: Steps, cache: KVCache) -> Tensor | None:
        """Run all `steps` of a chain in one call and return its tokens (`Ops.replayer`); None if unsupported."""
        chain = getattr(self._run, "chain", None)
        return None if chain is None else cast("Tensor | None", chain(batch, steps, cache, ()))

    def grow(self, trees: Seq[Any], num_rows: int, logits: Tensor, cache: KVCache, ends: Ends | None) -> Grown | None:
        """Grow draft trees on the backend, one `forward` pass per level; None where the backend cannot.

        logits [B, V] are those after the last known rows; see `PlanReplay.grow` for arguments and result.
        """
        grow = getattr(self._run, "grow", None)
        if grow is None or self.token_ids is not None:  # noise is keyed by token id, not by row of the LM head
            return None
        return cast("Grown | None", grow(trees, num_rows, logits, None, cache, (), ends))

    def _forward(
        self, ops: Ops, batch: Batch, cache: KVCache, captures: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        c, w, eps = self.config, self.weights, self.config.rms_eps
        batch = batch.on(self.device)
        x = ops.embedding(batch.token_ids, w.embedding)  # [T, C]
        kept: dict[int, Tensor] = {}
        for i, layer in enumerate(w.layers):
            rows = normed_rows(x, layer.input_norm, eps)
            then = Then(w.layers[i + 1].input_norm, eps, w.layers[i + 1].qkv) if i + 1 < len(w.layers) else None
            x = run_layer(ops, c, layer, rows, x, batch, cache.layers[i], self.rope, c.windows[i], then)
            if i in captures:
                kept[i] = x
        logits = ops.product(normed_rows(x, w.norm, eps, batch.logit_rows), w.lm_head)
        hidden = ops.capture([kept[i] for i in captures]) if captures else None
        chosen = None if batch.draws is None else ops.choose(logits, batch.draws, self.token_ids)
        return logits, hidden, chosen
