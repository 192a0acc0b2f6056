"""Block heads: all tokens of a draft in one pass (DFlash: Chen et al., 2026; DSpark: DeepSeek-AI, 2026).

A block is the last known token followed by mask tokens. A few decoder layers read it; every place attends to the whole
block, in causal layers to the places before it. Each layer also attends to keys and values computed from the
target's hidden states: fc of several of the target's layers, normed, then the layer's own projections. A Markov head
may add to the logits of the next token a bias that depends on the token before. In DFlash2, layers also mix each place
with those before it (`BlockConv`), and a selector scores the likeliest tokens after the token before (`Selector`).

Letters as in `ops`; F: width of the hidden states that the head reads from the target, Vd: size of the head's own
vocabulary, A: rank of the Markov head or the selector.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from sameseed.batch import Batch, Draw, Rows, build_batch, pack, slots_of
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.cache import KVCache
from sameseed.models.decoder import Runnable
from sameseed.models.head_config import BlockConfig
from sameseed.models.layers import LayerWeights, Weights, attention, rope_table, run_layer
from sameseed.ops import Ops, gated_rows, normed_rows, plain_rows
from sameseed.request import Sequence
from sameseed.scheme import KVLayer, QuantTensor

INJECT, GUESS = (1,), (0,)  # the two passes


@dataclass(frozen=True, eq=False)
class BlockConv(Weights):
    """DFlash2's convolution over the places of a block, of what a part of a layer reads (side 0) and adds (side 1).

    A value is multiplied with its own weight, and the values of the places before it with theirs. A weight is `base`
    [2, taps, C] plus a number for each group of columns, which `projection` [2 taps G, C] makes of what the part reads.
    """

    base: Tensor
    projection: QuantTensor

    def numbers(self, ops: Ops, x: Tensor) -> Tensor:
        """The numbers [T, 2, taps, G] for x [T, C]."""
        return ops.product(plain_rows(x), self.projection).view(len(x), *self.base.shape[:2], -1)

    def mixed(self, x: Tensor, numbers: Tensor, side: int, size: int) -> Tensor:
        """x [T, C], of blocks of `size` places, convolved."""
        blocks = x.view(-1, size, x.shape[1])
        weights = self.base[side] + numbers[:, side].repeat_interleave(x.shape[1] // numbers.shape[-1], dim=-1)
        total = weights[:, 0] * x
        for tap in range(1, min(size, weights.shape[1])):
            total = total + weights[:, tap] * pad(blocks[:, :-tap], (0, 0, tap, 0)).reshape(x.shape)
        return total


@dataclass(frozen=True)
class Selector(Weights):
    """DFlash2's selector: what it adds to the logit of a candidate, given the token before and the place's gate."""

    gate: QuantTensor  # [A, C]
    before: QuantTensor  # [V, A]
    after: QuantTensor  # [V, A]

    def scores(self, ops: Ops, last: int, token_ids: Tensor, gate: Tensor) -> Tensor:
        """[n] for the candidates `token_ids` int32 [n] after the token `last`; `gate` [A]."""
        before = ops.embedding(torch.tensor([last], dtype=torch.int32, device=token_ids.device), self.before)
        return ops.embedding(token_ids, self.after) @ (before[0] * gate)


@dataclass(frozen=True)
class BlockWeights(Weights):
    """Weights of a block head. Norms are float32; `target_ids` int32 [Vd] as in `HeadWeights`.

    `markov`: embedding [V, A] and projection [Vd, A] of the Markov head, or None. `convs`: those of each layer's
    attention and MLP, or none.
    """

    embedding: QuantTensor  # [V, C]
    fc: QuantTensor  # [C, F]
    hidden_norm: Tensor  # [C]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [C]
    lm_head: QuantTensor  # [Vd, C]
    markov: tuple[QuantTensor, QuantTensor] | None
    target_ids: Tensor | None
    convs: tuple[tuple[BlockConv, BlockConv], ...] = ()
    selector: Selector | None = None
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
        self._can_record = not (weights.convs or any(config.causal))  # such a pass has one mask, and no convolution

    @torch.inference_mode()
    def inject(self, states: Tensor, batch: Batch, cache: KVCache) -> None:
        """Store keys and values, computed from the target's captured hidden states [T, F], for the rows of `batch`."""
        self._run(batch, cache, INJECT, states)

    @torch.inference_mode()
    def guess(self, batch: Batch, cache: KVCache) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [R, Vd] of `batch.logit_rows` in blocks behind the stored rows, without the Markov head.

        With a selector also its gates [R, A].
        """
        run = self._run if self._can_record else partial(self._forward, self.ops)
        logits, gates, _ = run(batch, cache, GUESS)
        return logits, gates

    @torch.inference_mode()
    def bias(self, token_ids: Tensor) -> Tensor:
        """The bias [B, Vd] that the Markov head adds to the logits after tokens [B] (ids of the target)."""
        assert self.weights.markov is not None
        before, after = self.weights.markov
        return self.ops.product(plain_rows(self.ops.embedding(token_ids, before)), after)

    @torch.inference_mode()
    def selected(self, row: NDArray[np.float32], last: int, gate: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits `row` [Vd] with the selector's scores after the token `last`; -inf but for its candidates."""
        w = self.weights
        assert w.selector is not None
        best = np.argpartition(row, -min(self.config.num_candidates, len(row)))[-self.config.num_candidates :]
        ids = torch.from_numpy(best.astype(np.int32)).to(self.device)
        ids = ids if w.target_ids is None else w.target_ids[ids.long()]
        scores = w.selector.scores(self.ops, last, ids, torch.from_numpy(gate).to(self.device)).cpu().numpy()
        found = np.full_like(row, -np.inf)
        found[best] = row[best] + scores
        return found

    def _forward(
        self, ops: Ops, batch: Batch, cache: KVCache, how: tuple[int, ...], *states: Tensor
    ) -> tuple[Tensor, Tensor | None, None]:
        c, w, eps = self.config.layer, self.weights, self.config.layer.rms_eps
        batch = batch.on(self.device)
        if how == INJECT:  # store keys and values of the features [T, C] in the cache of every layer
            rows = normed_rows(ops.product(plain_rows(states[0]), w.fc), w.hidden_norm, eps)
            for layer, kv in zip(w.layers, cache.layers, strict=True):
                qkv = ops.product(rows, layer.qkv, layer.qkv_bias)  # [T, (H + 2 Hk) D]
                ops.rope_store(qkv, c.num_heads, kv, batch, self.rope, layer.head_norms, eps)  # queries are not used
            return torch.empty(0, w.lm_head.shape[0], device=self.device), None, None
        x = ops.embedding(batch.token_ids, w.embedding)  # [T, C]
        before = _causal(batch, self.config.block_size)
        kinds = zip(w.layers, cache.layers, c.windows, self.config.causal, strict=True)
        for i, (layer, kv, window, causal) in enumerate(kinds):
            seen = before if causal else batch
            if window is not None and not causal:
                window += self.config.block_size - 1  # counted from the first place; the others see as far back
            if w.convs:
                x = self._mixed_layer(ops, layer, w.convs[i], x, seen, kv, window)
            else:
                rows = normed_rows(x, layer.input_norm, eps)
                x = run_layer(ops, c, layer, rows, x, seen, kv, self.rope, window)
        last = normed_rows(x, w.norm, eps, batch.logit_rows)
        gates = None if w.selector is None else ops.product(last, w.selector.gate)
        return ops.product(last, w.lm_head), gates, None

    def _mixed_layer(
        self,
        ops: Ops,
        w: LayerWeights,
        convs: tuple[BlockConv, BlockConv],
        x: Tensor,
        batch: Batch,
        kv: KVLayer,
        window: int | None,
    ) -> Tensor:
        """A layer whose parts are convolved: the output [T, C] for x [T, C]."""
        c, eps, size = self.config.layer, self.config.layer.rms_eps, self.config.block_size
        assert w.gate_up is not None and w.down is not None
        gate_up, down = w.gate_up, w.down

        def attend(rows: Tensor) -> Tensor:
            out = attention(ops, c, w, plain_rows(rows), batch, kv, self.rope, window)
            return ops.product(plain_rows(out), w.o, w.o_bias)

        def mlp(rows: Tensor) -> Tensor:
            return ops.product(gated_rows(ops.product(plain_rows(rows), gate_up, w.gate_up_bias)), down, w.down_bias)

        for norm, conv, part in ((w.input_norm, convs[0], attend), (w.post_norm, convs[1], mlp)):
            rows = ops.rms_norm(x, norm, eps)
            numbers = conv.numbers(ops, rows)
            x = x + conv.mixed(part(conv.mixed(rows, numbers, 0, size)), numbers, 1, size)
        return x


def _causal(batch: Batch, size: int) -> Batch:
    """A batch of blocks of `size` rows, in which a row sees itself and those before it."""
    places = torch.arange(batch.num_rows, device=batch.positions.device) % size
    return replace(batch, tree_mask=(torch.full_like(places, 2) << places) - 1, key_positions=None)


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

    def guess(self, holders: Seq[Sequence], last: Seq[int], counts: Seq[int]) -> tuple[Tensor, Tensor | None]:
        """Logits [sum of counts, Vd] of the first counts[b] guesses after the token last[b], which follows b's rows.

        With a selector also its gates, a row for each guess. The rows of a block stay in the cache behind the holder's
        rows until they are overwritten.
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
