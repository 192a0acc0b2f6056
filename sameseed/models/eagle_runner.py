"""HeadRunner: an EAGLE head with its KV cache. It runs known tokens, and levels of the draft trees that it grows."""

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
from sameseed.models.drawn import Drawn, steps_after
from sameseed.models.eagle import EagleHead
from sameseed.ops import Ends, Grown
from sameseed.request import Sequence


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
    """Runs a head over sequences that own blocks of its cache; rows attend to `window` tokens (None: all)."""

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
        return self.model.forward(features, self._batch(levels), self.cache, self.window)

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
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        masks: list[int] = []
        offsets = [0]
        for level in levels:
            known, count = level.holder.num_cached, len(level.masks)
            first = known + level.first
            tokens += level.tokens
            positions += [known + level.masks[0].bit_count() - 1] * count
            slots += slots_of(level.holder.blocks, first, first + count, self.cache.block_size)
            masks += level.masks
            offsets.append(len(tokens))
        known_lengths = [level.holder.num_cached for level in levels]
        rows = list(range(len(tokens)))
        numbers = (tokens, positions, slots, offsets, [0] * len(levels), known_lengths, rows)
        return pack(numbers, [level.holder.blocks for level in levels], masks)
