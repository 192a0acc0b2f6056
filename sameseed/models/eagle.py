"""EAGLE heads: one decoder layer that drafts from the target's own hidden states.

EAGLE-1 and 2 (Li et al., 2024): fc of [embedding; feature], then a layer without its first norm, then the target's LM
head; a feature is the input of the target's LM head. EAGLE-3 (Li et al., 2025): fc of three of the target's layers
makes the feature, and q, k, v read [norm(embedding); norm(feature)]. The feature at position t goes with token t + 1.

Letters as in `ops`; F: width of the hidden states that the head reads from the target, Vd: size of the head's own
vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sameseed.batch import UNKNOWN, Batch, Draw, Draws, Rows, build_batch, int_tensors, pack, slots_of
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.cache import KVCache
from sameseed.models.decoder import Runnable
from sameseed.models.drawn import Drawn, steps_after
from sameseed.models.head_config import HeadConfig
from sameseed.models.layers import LayerWeights, Weights, rope_table, run_layer
from sameseed.ops import Ends, Grown, Ops, RowSource, normed_rows, plain_rows
from sameseed.request import Sequence
from sameseed.scheme import QuantTensor


@dataclass(frozen=True)
class HeadWeights(Weights):
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
    def run(
        self, x: Tensor, batch: Batch, cache: KVCache, window: int | None = None, *, captured: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the rows of `batch`, each a token with the feature x [T, C] of the position before it.

        `captured`: x [T, F] are the target's captured hidden states, from which the features are computed. `window`:
        number of tokens that a row attends to, itself included. Returns logits float32 [R, Vd] of `batch.logit_rows`,
        the head's own features [T, C], which replace the target's features when the head continues its own draft, and
        the tokens (ids of the target) drawn by `batch.draws`.
        """
        logits, features, chosen = self._pass(batch, cache, (int(captured), window or 0), x)
        assert features is not None
        return logits, features, chosen

    def _forward(
        self, ops: Ops, batch: Batch, cache: KVCache, how: tuple[int, int], x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`run`; `how`: captured or not, and the window (0: none)."""
        c, w, eps = self.config.layer, self.weights, self.config.layer.rms_eps
        captured, window = how
        batch = batch.on(self.device)
        seen = min((n for n in (window, c.windows[0]) if n), default=None)

        features = self._features(ops, x) if captured else x
        rows, residual = self._entering(ops, ops.embedding(batch.token_ids, w.embedding), features)
        x = run_layer(ops, c, w.layer, rows, residual, batch, cache.layers[0], self.rope, seen)
        last = plain_rows(x, batch.logit_rows) if w.norm is None else normed_rows(x, w.norm, eps, batch.logit_rows)
        logits = ops.product(last, w.lm_head)
        own = ops.rms_norm(x, w.norm, eps) if w.norm is not None and self.config.norm_output else x
        return logits, ops.capture([own]), self._chosen(ops, logits, batch)

    def _entering(self, ops: Ops, embedding: Tensor, features: Tensor) -> tuple[RowSource, Tensor]:
        """The rows that attention reads, and the residual [T, C]; from the tokens' embedding and features [T, C]."""
        w, eps = self.weights, self.config.layer.rms_eps
        if w.feature_norm is None:
            residual = ops.product(plain_rows(ops.beside([embedding, features])), w.fc, w.fc_bias)
            return plain_rows(residual), residual
        normed = ops.rms_norm(features, w.feature_norm, eps)
        both = ops.beside([ops.rms_norm(embedding, w.layer.input_norm, eps), normed])  # [T, 2 C]
        return plain_rows(both), normed if self.config.norm_before_residual else features

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


@dataclass(frozen=True)
class TreeLevel:
    """Nodes of one depth of a sequence's draft tree: tokens [n], masks of cache places (their own and ancestors').

    Their places in the cache are `first`, `first` + 1, and so on, counted from the first draft row.
    """

    holder: Sequence  # owns the blocks; all rows of its tokens are in the cache
    tokens: Seq[int]
    masks: Seq[int]
    first: int


class HeadRunner:
    """Runs a head over sequences that own blocks of its cache; rows attend to `window` tokens (None: all).

    It runs known tokens, and levels of the draft trees that it grows.
    """

    def __init__(self, head: EagleHead, cache: KVCache, window: int | None = None) -> None:
        self.model = head
        self.cache = cache
        self.blocks = BlockManager(cache.num_blocks, cache.block_size)
        self.window = window

    def extend(
        self,
        holders: Seq[Sequence],
        tokens: Seq[Seq[int]],
        hidden: Seq[Tensor],
        wants_logits: bool,
        draws: Seq[Draw] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add rows to the cache: holder b's tokens, each with the target's hidden states [n, F] of the position before.

        Returns logits [B, Vd] after each holder's last row (empty unless `wants_logits`), its feature [B, C], and the
        tokens drawn by `draws` (one per holder) with their confidences, where the device chooses (`Ops.choose`).
        """
        rows = [Rows(t, s.num_cached, [], [], s.blocks, wants_logits) for s, t in zip(holders, tokens, strict=True)]
        batch = build_batch(rows, self.cache.block_size)
        if draws is not None and self.model.ops.chooses:
            batch = replace(batch, draws=Draws.of(draws, True))
        states = hidden[0] if len(hidden) == 1 else torch.cat(list(hidden))
        logits, own, chosen = self.model.run(states, batch, self.cache, self.window, captured=True)
        for s, t in zip(holders, tokens, strict=True):
            s.num_cached += len(t)
        if len(holders) == 1:
            return logits, own[-1:], chosen
        (last,) = int_tensors(([n - 1 for n in itertools.accumulate(map(len, tokens))],), self.model.device)
        return logits, own.index_select(0, last), chosen

    def expand(self, levels: Seq[TreeLevel], features: Tensor) -> tuple[Tensor, Tensor]:
        """Run one level of several trees; features [T, C] are those of the nodes' parents.

        Returns logits [T, Vd] and the nodes' own features [T, C]. The nodes' rows stay in the cache behind the
        holder's rows, by place, until they are overwritten.
        """
        return self.model.run(features, self._batch(levels), self.cache, self.window)[:2]

    def grow(self, trees: Seq[Any], num_rows: int, logits: Tensor, features: Tensor, ends: Ends | None) -> Grown | None:
        """Run all levels of several trees (`expand`) in one call, or None if unsupported; see `PlanReplay.grow`."""
        return self.model.grow(trees, num_rows, logits, features, self.cache, (0, self.window or 0), ends)

    def draw(
        self,
        holders: Seq[Sequence],
        counts: Seq[int],
        chosen: Tensor | None,
        features: Tensor,
        draws: Callable[[int, int], Draw],
    ) -> Drawn | None:
        """Draft a chain of counts[b] >= 1 tokens after each holder's rows, without reading them on the host.

        A pass drafts one level. `chosen` (the first tokens) and features [B, C] come from the last rows (`extend`);
        draws(b, depth): how sequence b's token at a depth is drawn. Confidences come with the tokens. None where the
        device does not choose.
        """
        drawn = Drawn(counts)
        for depth in range(1, max(counts)):
            if chosen is None:
                return None
            drawn.add(chosen)
            running, sees = drawn.running(depth), (1 << depth) - 1  # mask of all nodes so far
            batch = self._batch([TreeLevel(holders[b], [UNKNOWN], [sees], depth - 1) for b in running])
            batch = replace(batch, draws=Draws.of([draws(b, depth) for b in running], True))
            batch = batch.with_late(drawn.last(depth).clamp(min=0))  # FAILED becomes any valid token
            features = drawn.going(features, depth)
            if depth == 1 and (rest := self._rest(holders, drawn, features, batch, draws)) is not None:
                drawn.add_rest(rest)
                return drawn
            _, features, chosen = self.model.run(features, batch, self.cache, self.window)
        if chosen is None:
            return None
        drawn.add(chosen)
        return drawn

    def _rest(
        self, holders: Seq[Sequence], drawn: Drawn, features: Tensor, batch: Batch, draws: Callable[[int, int], Draw]
    ) -> Tensor | None:
        """The choices of level `batch` and all later ones, run in one call; None if unsupported."""
        running = drawn.running(1)
        steps = steps_after(
            batch,
            [holders[b].blocks for b in running],
            [holders[b].num_cached for b in running],
            [drawn.counts[b] - 1 for b in running],
            self.cache.block_size,
            lambda i, step: draws(running[i], 1 + step),
        )
        return None if steps is None else self.model.chain(batch, steps, self.cache, (0, self.window or 0), features)

    def _batch(self, levels: Seq[TreeLevel]) -> Batch:
        """The batch of one level of several trees."""
        tokens, positions, slots, masks, offsets = list[int](), list[int](), list[int](), list[int](), [0]
        for level in levels:
            known, count = level.holder.num_cached, len(level.masks)
            tokens += level.tokens
            positions += [known + level.masks[0].bit_count() - 1] * count
            first = known + level.first
            slots += slots_of(level.holder.blocks, first, first + count, self.cache.block_size)
            masks += level.masks
            offsets.append(len(tokens))
        holders = [level.holder for level in levels]
        cached, rows = [h.num_cached for h in holders], list(range(len(tokens)))
        arrays = (tokens, positions, slots, offsets, [0] * len(levels), cached, rows)
        return pack(arrays, [h.blocks for h in holders], masks)
