"""Block heads: all tokens of a draft in one pass (DFlash: Chen et al., 2026; DSpark: DeepSeek-AI, 2026).

A block is the last known token followed by mask tokens. A few decoder layers read it; every place attends to the whole
block. Each layer also attends to keys and values computed from the target's hidden states: fc of several of the
target's layers, normed, then the layer's own projections. A Markov head may add to the logits of the next token a bias
that depends on the token before.

Letters as in `ops`; F: width of the hidden states that the head reads from the target, Vd: size of the head's own
vocabulary, A: rank of the Markov head.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sameseed.batch import Batch, Draw, Rows, build_batch, pack, slots_of
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.cache import KVCache
from sameseed.models.decoder import Runnable
from sameseed.models.head_config import BlockConfig
from sameseed.models.layers import LayerWeights, Weights, rope_table, run_layer
from sameseed.ops import Ops, normed_rows, plain_rows
from sameseed.request import Sequence
from sameseed.scheme import QuantTensor

INJECT, GUESS = (1,), (0,)  # the two passes


@dataclass(frozen=True)
class BlockWeights(Weights):
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


class BlockRunner:
    """Runs a block head over sequences that own blocks of its cache."""

    def __init__(self, head: BlockHead, cache: KVCache) -> None:
        self.model = head
        self.cache = cache
        self.blocks = BlockManager(cache.num_blocks, cache.block_size)

    def extend(
        self,
        holders: Seq[Sequence],
        tokens: Seq[Seq[int]],
        hidden: Seq[Tensor],
        wants_logits: bool,
        draws: Seq[Draw] | None = None,
    ) -> tuple[Tensor, Tensor, None]:
        """Add rows to the cache: for each of holder b's tokens one row, from the target's hidden states [n, F].

        Only the number of tokens matters. `wants_logits` and `draws` are ignored: logits and features are empty, and
        there are no choices.
        """
        rows = [Rows(t, s.num_cached, [], [], s.blocks, False) for s, t in zip(holders, tokens, strict=True)]
        batch = build_batch(rows, self.cache.block_size)
        self.model.inject(hidden[0] if len(hidden) == 1 else torch.cat(list(hidden)), batch, self.cache)
        for s, t in zip(holders, tokens, strict=True):
            s.num_cached += len(t)
        nothing = torch.empty(0, 1)
        return nothing, nothing, None

    def guess(self, holders: Seq[Sequence], last: Seq[int], counts: Seq[int]) -> Tensor:
        """Logits [sum of counts, Vd] of the first counts[b] guesses after the token last[b], which follows b's rows.

        The rows of a block stay in the cache behind the holder's rows until they are overwritten.
        """
        config = self.model.config
        size, first = config.block_size, config.block_size - config.num_guesses
        tokens, positions, slots, logit_rows, ends = list[int](), list[int](), list[int](), list[int](), list[int]()
        for holder, token, count in zip(holders, last, counts, strict=True):
            known = holder.num_cached
            logit_rows += range(len(tokens) + first, len(tokens) + first + count)
            tokens += [token] + [config.mask_token] * (size - 1)
            positions += range(known, known + size)
            ends += [known + size - 1] * size
            slots += slots_of(holder.blocks, known, known + size, self.cache.block_size)
        offsets = list(range(0, len(tokens) + 1, size))
        # Every place attends to the whole block, so attention treats each row as the last one with all others before.
        masks = [(1 << size) - 1] * len(tokens)
        numbers = (tokens, positions, slots, offsets, [0] * len(holders), [h.num_cached for h in holders], logit_rows)
        batch = pack(numbers, [h.blocks for h in holders], masks)
        batch = replace(batch, key_positions=torch.tensor(ends, dtype=torch.int32, device="cpu"))
        return self.model.guess(batch, self.cache)
