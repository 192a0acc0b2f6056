"""HeadRunner: an EAGLE head with its cache. It runs known positions, and levels of trees that it guesses itself."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.batch import Batch, Rows, build_batch
from foretoken.kvcache.blocks import BlockManager
from foretoken.kvcache.cache import KVCache
from foretoken.models.eagle import EagleHead
from foretoken.request import Sequence


@dataclass(frozen=True)
class Level:
    """Nodes of one level of a sequence's tree: tokens, masks of cache places (their own and ancestors'), places."""

    holder: Sequence  # owns the blocks; all its rows are in the cache
    tokens: Seq[int]
    masks: Seq[int]
    places: Seq[int]


class HeadRunner:
    """Runs a head over sequences that own blocks of its cache, `window` tokens in sight (None: all)."""

    def __init__(self, head: EagleHead, cache: KVCache, window: int | None = None) -> None:
        self.model = head
        self.cache = cache
        self.blocks = BlockManager(cache.num_blocks, cache.block_size)
        self.window = window

    def extend(
        self, holders: Seq[Sequence], tokens: Seq[Seq[int]], hidden: Seq[Tensor], wants_logits: bool
    ) -> tuple[Tensor, Tensor]:
        """Add rows to the cache: of holder b the tokens, each with the target's hidden states [n, F] a position before.

        Returns logits [B, Vd] after each one's last row (none unless `wants_logits`) and its feature [B, C].
        """
        rows = [Rows(t, s.num_cached, [], [], s.blocks, wants_logits) for s, t in zip(holders, tokens, strict=True)]
        batch = build_batch(rows, self.cache.block_size, self.model.device)
        features = self.model.features(torch.cat(list(hidden)))
        logits, own = self.model.forward(features, batch, self.cache, self.window)
        for s, t in zip(holders, tokens, strict=True):
            s.num_cached += len(t)
        return logits, own.index_select(0, batch.row_offsets[1:] - 1)

    def expand(self, levels: Seq[Level], features: Tensor) -> tuple[Tensor, Tensor]:
        """Run one level of several trees; features [T, C] are those of the nodes' parents.

        Returns logits [T, Vd] and the nodes' own features [T, C]. The rows lie in the cache behind the holder's
        own, by place, until they are written over.
        """
        batch = self._batch(levels)
        return self.model.forward(features, batch, self.cache, self.window)

    def _batch(self, levels: Seq[Level]) -> Batch:
        size = self.cache.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        masks: list[int] = []
        offsets = [0]
        for level in levels:
            known, blocks = level.holder.num_cached, level.holder.blocks
            tokens += level.tokens
            positions += [known + mask.bit_count() - 1 for mask in level.masks]
            slots += [blocks[i // size] * size + i % size for i in (known + p for p in level.places)]
            masks += [m - (1 << 64) if m >> 63 else m for m in level.masks]  # int64 read as uint64
            offsets.append(len(tokens))
        width = max(len(level.holder.blocks) for level in levels)
        tables = [[*level.holder.blocks, *([0] * (width - len(level.holder.blocks)))] for level in levels]

        def ints(values: Seq[int] | Seq[Seq[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.model.device)

        return Batch(
            token_ids=ints(tokens),
            positions=ints(positions),
            slots=ints(slots),
            row_offsets=ints(offsets),
            num_pending=ints([0] * len(levels)),
            kv_lens=ints([level.holder.num_cached for level in levels]),
            block_tables=ints(tables),
            tree_mask=torch.tensor(masks, dtype=torch.int64, device=self.model.device),
            logit_rows=torch.arange(len(tokens), dtype=torch.int32, device=self.model.device),
        )
